"""An open session of the offline API: input that is given in pieces, with answers in between."""

from typing import Any

from quire.frontend.engine.job import Job
from quire.frontend.sessions.chat_piece import check_kind, encode_chat_piece, whole_prompt
from quire.frontend.sessions.open_session import TEXT, OpenSession, Piece
from quire.frontend.text.prompts import Prompt, check_template_variables
from quire.frontend.text.text_in import ChatOptions, TextIn
from quire.launch.offline.calls import OfflineCalls
from quire.launch.offline.prompt_input import PromptInput
from quire.launch.offline.request_output import RequestOutput
from quire.protocol.errors import InvalidRequest
from quire.protocol.request.sampling_params import SamplingParams

PROMPT_ONLY = SamplingParams(max_tokens=1, temperature=0.0)


class OfflineSession:
    """A prompt that grows by pieces and by the answers to them; made by ``LLM.session``. A context manager.

    The text of each answer is that of one request with all tokens so far. Between its pieces a session uses nothing of
    the engine, and needs no ``close``.
    """

    def __init__(self, calls: OfflineCalls, text_in: TextIn) -> None:
        self._name = calls.new_session_name()
        self._job = Job(self._name, hint="session")
        self._calls = calls
        self._text_in = text_in
        self._limits = calls.client
        self._session: OpenSession | None = OpenSession(0, 0.0)

    def __enter__(self) -> "OfflineSession":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def token_ids(self) -> list[int]:
        """The tokens of all pieces and answers so far."""
        tokens: list[int] = self._open().token_ids.tolist()
        return tokens

    def close(self) -> None:
        """End the session. May be called twice."""
        self._session = None

    def append(self, prompt: PromptInput) -> RequestOutput:
        """Add a prompt and compute it now, without an answer; otherwise as ``generate``."""
        return self._generate(prompt, None, has_answer=False)

    def append_messages(self, messages: list[dict[str, Any]]) -> RequestOutput:
        """Add messages and compute them now, without an answer; otherwise as ``chat``."""
        return self._chat(messages, ChatOptions(add_generation_prompt=False), None, has_answer=False)

    def generate(
        self, prompt: PromptInput | None = None, sampling_params: SamplingParams | None = None
    ) -> RequestOutput:
        """Add a prompt, and continue all tokens so far. The prompt and the answer become a part of the session.

        Args:
            prompt: as of ``LLM.generate``, or None to continue what was appended.
            sampling_params: with n 1. None: ``LLM.default_sampling_params()``.

        Raises:
            InvalidRequest: the session has ended, is busy, or continues a chat; or the piece is refused, and the
                session is as it was.
            EngineError: the engine has failed.
        """
        return self._generate(prompt, sampling_params, has_answer=True)

    def chat(
        self,
        messages: list[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> RequestOutput:
        """Add messages, and answer them; otherwise as ``generate``. Earlier messages are not repeated.

        Args:
            tools, chat_template_kwargs: as of ``LLM.chat``.
        """
        variables = None if chat_template_kwargs is None else check_template_variables(chat_template_kwargs)
        return self._chat(messages, ChatOptions(variables=variables, tools=tools), sampling_params, has_answer=True)

    def _chat(
        self, given: list[dict[str, Any]], options: ChatOptions, params: SamplingParams | None, *, has_answer: bool
    ) -> RequestOutput:
        session = self._open()
        messages, options = self._calls.conversation(given, options)
        check_kind(self._name, session, is_chat=True)
        prompt = encode_chat_piece(session, messages, options, self._text_in, self._limits)
        return self._submit(session, prompt, params, messages[-1]["role"], has_answer=has_answer)

    def _generate(self, given: PromptInput | None, params: SamplingParams | None, *, has_answer: bool) -> RequestOutput:
        session = self._open()
        check_kind(self._name, session, is_chat=False)
        prompt = None if given is None else self._calls.encode(given, add_special_tokens=not session.tokens)
        return self._submit(session, prompt, params, TEXT, has_answer=has_answer)

    def _submit(
        self, session: OpenSession, prompt: Prompt | None, params: SamplingParams | None, end: str, *, has_answer: bool
    ) -> RequestOutput:
        if params is not None and (params.n != 1 or params.use_beam_search):
            name = "use_beam_search" if params.use_beam_search else "n"
            raise InvalidRequest(f"{name} cannot be used with a session, to which one answer is added", name)
        ids = [] if prompt is None else prompt.token_ids.tolist()
        items = () if prompt is None else prompt.items
        with Piece(self._name, session, ids, self._limits.max_model_len, end=end, items=items) as piece:
            whole = whole_prompt(piece, prompt, is_chat=end != TEXT)
            params = params if has_answer else PROMPT_ONLY
            (output,) = self._calls.run([whole], params, {}, self._job)
            (answer,) = output.outputs
            if not has_answer:
                answer.text, answer.token_ids = "", []
            piece.add(answer.token_ids, answer.finish_reason)
        return output

    def _open(self) -> OpenSession:
        if self._session is None:
            raise InvalidRequest(f"session {self._name} has ended", "session", "session_not_found")
        return self._session
