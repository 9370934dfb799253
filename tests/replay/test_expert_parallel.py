"""Profiles of several tensor-parallel degrees, links, and steps of engines that share experts."""

from pathlib import Path

import pytest
from made_up_profile import write_profile

from quire.bench.measure.shapes import SHAPES
from quire.protocol.errors import ConfigError
from quire.replay.costs.expert_parallel import NOTHING, ExpertParallelCost
from quire.replay.costs.layers import load_layer_profile
from quire.replay.costs.link import Interconnect
from quire.replay.costs.parse import parse_cost
from quire.replay.run.step_shape import StepShape
from quire.replay.simulate.whatif import prepare
from quire.replay.workload.workload import Call, Workload

MODEL = SHAPES["qwen3-30b-a3b"]
LAYERS, HIDDEN, EXPERTS = 48, 2048, 128


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_profile(tmp_path)
    return tmp_path


def decodes(n: int) -> StepShape:
    return StepShape([], n, n * 16, n, 16)


LINK = Interconnect(10e9, 2e-6)


def test_a_degree_has_its_own_tables_and_all_reduces(folder: Path) -> None:
    (folder / "profile_moe_tp2.csv").write_text((folder / "profile_moe.csv").read_text())
    one, two = load_layer_profile(folder, None, 1), load_layer_profile(folder, None, 2)
    reduces = (2 * LAYERS + 1) * LINK.all_reduce(64 * HIDDEN * 2, 2)
    logits = LINK.all_gather(64 * MODEL.vocab_size, 2)
    half_of_dense = 0.1 * 64 * LAYERS * 1e-6
    step = decodes(64)
    assert two.seconds(step) - one.seconds(step) == pytest.approx(reduces + logits - half_of_dense)
    assert "2 ranks linked by 10 GB/s" in two.describe()


def test_engines_that_share_experts_wait_for_the_slowest(folder: Path) -> None:
    cost = ExpertParallelCost(folder, None, 1, 2)
    exchange = LINK.all_gather(64 * (HIDDEN + EXPERTS) * 2, 2) + LINK.all_gather(64 * HIDDEN * 2, 2)
    own = 5e-6 + LAYERS * (2 * 0.1 * 64 + 3) * 1e-6
    experts = (2 * 64 + 64) * 1e-6  # half of the experts, and half of the choices of 128 tokens
    expected = own + LAYERS * (exchange + experts)
    assert cost.seconds_together([decodes(64), decodes(64)]) == pytest.approx(expected, rel=1e-3)
    assert cost.seconds_together([decodes(64), NOTHING]) == pytest.approx(expected, rel=1e-3), "padded to the largest"
    assert cost.seconds(decodes(64)) == cost.seconds_together([decodes(64), NOTHING])
    prefill = StepShape([(2000, 0)], 0, 0, 1)
    assert cost.seconds_together([prefill, prefill]) > 1.2 * cost.seconds_together([prefill, NOTHING])


def test_graphs_are_captured_up_to_twice_the_engines_requests(folder: Path) -> None:
    small, large = (ExpertParallelCost(folder, None, 1, 2, max_num_seqs=n) for n in (16, 64))
    steps = [decodes(48), decodes(4)]
    assert small.seconds_together(steps) < large.seconds_together(steps), "48 tokens fit a graph of the second only"


def test_links_without_a_description_are_usual_ones(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "qwen3_moe"}')
    assert "linked by 25 GB/s" in ExpertParallelCost(folder, None, 1, 2).describe()
    (folder / "config.json").write_text('{"link_bw": 0}')
    with pytest.raises(ConfigError, match=r"config.json: Expected `float` > 0"):
        ExpertParallelCost(folder, None, 1, 2)


SHARING = {"data_parallel_size": "2", "enable_expert_parallel": "true"}


class TestSettings:
    def workload(self) -> Workload:
        return Workload("test", "nowhere", [Call(0, "0", 0.0, 8, 8)])

    def test_a_run_with_shared_experts(self, folder: Path) -> None:
        setup, cost = prepare(self.workload(), SHARING | {"like": "vllm-0.19.0"}, f"table:{folder}")
        assert isinstance(cost, ExpertParallelCost) and "experts over 2 ranks" in cost.describe()
        assert (setup.num_engines, setup.routing, setup.enable_expert_parallel) == (2, "vllm", True)
        assert setup.shown["routing"] == "vllm" and setup.shown["data_parallel_size"] == 2
        assert prepare(self.workload(), SHARING, f"table:{folder}")[0].routing == "cache"

    @pytest.mark.parametrize("cost", [None, "constant:10", "roofline:qwen3-30b-a3b,h200"])
    def test_other_machines_are_refused(self, cost: str | None) -> None:
        with pytest.raises(ConfigError, match=r"enable_expert_parallel needs (a|the) layer profile"):
            prepare(self.workload(), SHARING, cost)

    def test_a_missing_degree_is_refused(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match=r"profile_dense_tp4.csv not found: .* a degree .*\(1, 2; got 4"):
            prepare(self.workload(), {"tensor_parallel_size": "4"}, f"table:{folder}")
        with pytest.raises(ConfigError, match=r"profile_moe_tp2.csv not found"):
            parse_cost(f"table:{folder}", tensor_parallel_size=2)
        assert parse_cost(f"table:{folder}", tensor_parallel_size=2, expert_parallel=1).seconds(decodes(8)) > 0
        (folder / "profile_dense_tp1.csv").unlink()
        with pytest.raises(ConfigError, match=r"profile_dense.csv not found: .* a degree .*\(2; got 1"):
            parse_cost(f"table:{folder}")

    def test_a_model_without_experts_is_refused(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match="needs a model with experts"):
            parse_cost(f"table:{folder},tiny", expert_parallel=2)

    @pytest.mark.parametrize("number", ["0", "65"])
    def test_number_of_engines_has_a_range(self, number: str) -> None:
        with pytest.raises(ConfigError, match=rf"data_parallel_size must be between 1 and 64 \(got {number}\)"):
            prepare(self.workload(), {"data_parallel_size": number}, "constant:10")
