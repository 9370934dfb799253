"""Check of the pooled requests of a diff."""

from quire.protocol.model.model_config import ModelConfig
from quire.protocol.wire.worker_messages import NewRequestData, SchedulerOutput
from quire.worker_proc.batch.diff_check import After
from quire.worker_proc.batch.input_batch import InputBatch, StepRefused


class PoolingCheck:
    """Checks that the model can do what new requests ask for, and that pooled requests sample no tokens."""

    def __init__(self, batch: InputBatch, model: ModelConfig) -> None:
        self._batch, self._model = batch, model

    def require(self, step: SchedulerOutput, after: After) -> None:
        """
        Raises:
            StepRefused: the model cannot, or a pooled request has draft tokens, a chosen token or forks.
        """
        for new in step.new_requests:
            reason = _refusal(new, self._model)
            if reason:
                raise StepRefused(f"handle {new.handle} {reason}")
        named = [handle for handle, _ in (*step.drafts, *step.chosen)]
        named += [handle for pair in step.forks for handle in pair]
        pooled = {new.handle for new in step.new_requests if not new.samples}
        for handle in named:
            row = self._batch.row_of.get(handle)
            if handle in pooled or (row is not None and not self._batch.samples[row]):
                raise StepRefused(f"handle {handle} is pooled, and cannot have draft tokens, a chosen token or forks")


def _refusal(new: NewRequestData, model: ModelConfig) -> str:
    """Return why the model cannot serve a new request, or ""."""
    params, config = new.pooling, model.pooling
    if params is None:
        return "" if model.generates else "samples tokens, but the model has no head for tokens"
    if config is None or params.task not in config.tasks:
        tasks = "none" if config is None else ", ".join(config.tasks)
        return f"has the pooling task {params.task}; tasks of the model: {tasks}"
    if params.dimensions > config.size:
        return f"has {params.dimensions} dimensions, but vectors of the model have {config.size}"
    if new.num_computed_tokens and config.needs_every_token(params.task):
        return f"has {new.num_computed_tokens} computed tokens, but its pooling needs the hidden state of every token"
    return ""
