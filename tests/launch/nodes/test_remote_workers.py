"""Workers on node agents, which are processes of this machine: the same tokens, also after deaths."""

import pytest
from node_agents import llm_on_nodes, node_agents

from quire import LLM, SamplingParams
from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.model_folder import find_model
from quire.launch.config.options import EngineOptions
from quire.protocol.config import EngineConfig
from quire.protocol.errors import EngineError

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15] * 20, [16, 17]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def _config(num_ranks: int, model: str | None = None) -> EngineConfig:
    options = EngineOptions(model=model, tensor_parallel_size=num_ranks, max_num_seqs=8, num_gpu_blocks_override=200)
    return make_engine_config(options, folder=find_model(model))


def _tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.full
def test_two_nodes_give_the_tokens_of_one_process_also_after_the_death_of_a_node() -> None:
    with LLM.from_config(_config(1), quiet=True) as llm:
        expected = _tokens(llm)
    with node_agents(2) as agents, llm_on_nodes(_config(2), agents, 0, 1) as llm:
        assert _tokens(llm) == expected
        agents.kill(1)
        agents.start(1)
        assert _tokens(llm) == expected


@pytest.mark.full
def test_a_node_that_is_not_there_is_one_line() -> None:
    with node_agents(1) as agents:
        agents.kill(0)
        with (
            pytest.raises(EngineError, match="does not answer: no connection: is `quire node` running there"),
            llm_on_nodes(_config(1), agents, 0),
        ):
            pass
