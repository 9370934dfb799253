"""Which tests stand for each family of abuse, and how many mutations of it they try.

A family is a kind of input that somebody sends on purpose; a mutation is one such input. Where a test is parametrised
its parameters are counted, else what it goes through in a loop: a list of its own module.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

TESTS = Path(__file__).resolve().parents[2]
Count = Callable[[Any], int]


class Source(NamedTuple):
    """One test of a family.

    Attributes:
        test: file below ``tests``, and the test in it.
        count: of its module, how many mutations the test goes through each time; None: one for each parameter.
    """

    test: str
    count: Count | None = None

    def num_mutations(self) -> int:
        """Raises LookupError where there is no such test."""
        file, _, name = self.test.partition("::")
        module = _module(TESTS / file)
        test = _test(module, name)
        return _num_parameters(module, name) if self.count is None else _counted(self.count, module, test)


def _counted(count: Count, module: ModuleType, test: Any) -> int:
    """Raises LookupError where the test does not even name what is counted."""
    source = inspect.getsource(test)
    for name in _names(count.__code__):
        if name in vars(module) and name not in source:
            raise LookupError(f"{test.__name__} does not go through {name}")
    return count(module)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _num_parameters(module: ModuleType, name: str) -> int:
    total = 1
    holder: Any = module
    for part in name.split("."):
        holder = _test(holder, part)
        marks = vars(holder).get("pytestmark", [])
        for mark in marks if isinstance(marks, list) else [marks]:
            if mark.name == "parametrize":
                total *= len(list(mark.args[1]))
    return total


def _test(holder: Any, name: str) -> Any:
    for part in name.split("."):
        if part not in vars(holder):
            raise LookupError(f"{holder.__name__} has no {part}")
        holder = vars(holder)[part]
    return holder


@cache
def _module(path: Path) -> ModuleType:
    """A test module as it is, or was, imported by pytest; its fixtures are not begun."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path):
            return module
    spec = importlib.util.spec_from_file_location(f"counted_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outside(*names: str) -> Source:
    """Values of these fields that are outside of their ranges."""
    return Source(
        "abuse/test_numbers.py::test_outside_its_range",
        lambda m: sum(len(field.outside()) for field in m.RANGES if field.name in names),
    )


NO_IDS = "abuse/test_numbers.py::test_lists_of_what_is_no_token"
IMAGES = "abuse/test_media.py::test_images_are_refused_by_name"
LEAVING = "abuse/test_connections.py::TestLeaving.test_its_sequences_are_aborted"
READING = "abuse/test_slow_readers.py::TestOverSockets.test_its_request_is_given_up_and_others_go_on"

FAMILIES: dict[str, tuple[str, tuple[Source, ...]]] = {
    "A1": ("n", (outside("n"),)),
    "A2": ("best_of", (outside("best_of"),)),
    "A3": ("max_tokens", (outside("max_tokens", "max_completion_tokens"),)),
    "A4": (
        "min_tokens above max_tokens",
        (
            Source("abuse/test_numbers.py::test_fewer_tokens_than_the_fewest", lambda m: len(m.FEWEST_AND_MOST)),
            outside("min_tokens"),
        ),
    ),
    "A5": ("temperature", (outside("temperature"),)),
    "A6": ("top_p, min_p, top_k", (outside("top_p", "min_p", "top_k"),)),
    "A7": ("penalties", (outside("repetition_penalty", "presence_penalty", "frequency_penalty"),)),
    "A8": (
        "logit_bias",
        (Source("abuse/test_numbers.py::test_biases", lambda m: len(m.BIAS_KEYS) + len(m.BIAS_VALUES)),),
    ),
    "A9": (
        "ids of tokens to stop at, to allow, to ban",
        (
            Source(NO_IDS, lambda m: 2 * len(m.no_ids())),
            Source("abuse/test_texts.py::test_what_is_no_bad_word", lambda m: len(m.NO_WORDS)),
        ),
    ),
    "A10": (
        "prompts of token ids",
        (
            Source(NO_IDS, lambda m: len(m.no_ids())),
            Source("abuse/test_prompts.py::test_what_is_no_prompt", lambda m: len(m.NO_PROMPTS)),
        ),
    ),
    "A11": ("logprobs", (outside("logprobs", "prompt_logprobs", "top_logprobs"),)),
    "A12": ("stop strings", (Source("abuse/test_texts.py::test_what_is_no_stop_string", lambda m: len(m.NO_STOPS)),)),
    "A13": ("seed", (outside("seed"),)),
    "A14": (
        "prompts and conversations of nothing",
        (Source("abuse/test_prompts.py::test_what_is_no_conversation", lambda m: len(m.NO_CONVERSATIONS)),),
    ),
    "A15": (
        "prompts longer than the context",
        (
            Source("abuse/test_prompts.py::test_a_megabyte_of_it"),
            Source("abuse/test_prompts.py::test_prompts_of_ids_beyond_the_context", lambda m: len(m.LENGTHS)),
        ),
    ),
    "A16": ("bodies that lie", (Source("abuse/test_connections.py::TestBodies.test_a_body_that_lies"),)),
    "A17": ("heads without end", (Source("abuse/test_connections.py::TestHeads.test_a_head_without_end_is_cut"),)),
    "A18": (
        "slow senders",
        (
            Source(
                "abuse/test_connections.py::TestSlowSenders.test_what_never_ends_is_ended", lambda m: len(m.UNFINISHED)
            ),
            Source("abuse/test_connections.py::TestSlowSenders.test_a_byte_now_and_then_does_not_help"),
        ),
    ),
    "A19": (
        "JSON that is none, too deep, too long",
        (
            Source("abuse/test_json.py::test_what_is_no_json", lambda m: len(m.NOT_JSON)),
            Source("abuse/test_json.py::test_what_is_too_deep_or_too_long", lambda m: len(m.TOO_MUCH)),
        ),
    ),
    "A20": (
        "every type in every field",
        (Source("abuse/test_json.py::test_every_value_in_every_field", lambda m: len(m.PATHS) * len(m.VALUES)),),
    ),
    "A21": (
        "names of models",
        (Source("abuse/test_names.py::test_models_that_are_not_there", lambda m: len(m.MODELS)),),
    ),
    "A22": (
        "regular expressions",
        (
            Source("abuse/test_grammars.py::test_regular_expressions_that_cannot_be", lambda m: len(m.REGEXES)),
            Source("abuse/test_grammars.py::test_regular_expressions_that_only_look_so"),
        ),
    ),
    "A23": (
        "JSON schemas",
        (
            Source("abuse/test_grammars.py::test_schemas_that_cannot_be", lambda m: len(m.SCHEMAS)),
            Source("abuse/test_grammars.py::test_texts_that_are_no_schema", lambda m: len(m.NOT_SCHEMAS)),
        ),
    ),
    "A24": (
        "grammars",
        (
            Source("abuse/test_grammars.py::test_grammars_that_cannot_be", lambda m: len(m.GRAMMARS)),
            Source("abuse/test_grammars.py::test_grammars_that_only_look_so"),
        ),
    ),
    "A25": (
        "many distinct schemas",
        (Source("abuse/test_grammars.py::test_distinct_schemas_do_not_pile_up", lambda m: m.NUM_DISTINCT),),
    ),
    "A26": (
        "two constraints at once",
        (
            Source("abuse/test_grammars.py::test_a_constraint_of_no_form_or_of_two", lambda m: len(m.PAIRS)),
            Source(
                "abuse/test_grammars.py::test_two_fields_that_constrain", lambda m: len(m.KINDS) * len(m.CONSTRAINTS)
            ),
        ),
    ),
    "A27": (
        "grammars that allow nothing",
        (Source("abuse/test_grammars.py::test_what_allows_nothing_is_told_before_or_when_it_is_found_out"),),
    ),
    "A28": (
        "tools",
        (
            Source("abuse/test_tools.py::test_tools_of_no_form", lambda m: len(m.NO_TOOLS)),
            Source("abuse/test_tools.py::test_parameters_that_no_call_could_have", lambda m: 4 * len(m.BAD_PARAMETERS)),
            Source("abuse/test_tools.py::test_choices_of_none_of_the_tools", lambda m: len(m.NO_CHOICES)),
        ),
    ),
    "A29": (
        "answers that a parser finds hard",
        (Source("abuse/test_tools.py::test_a_call_is_looked_for_in_linear_time"),),
    ),
    "A30": (
        "templates in requests",
        (Source("abuse/test_templates.py::test_a_template_in_a_request_is_refused", lambda m: 3 * len(m.TEMPLATES)),),
    ),
    "A31": (
        "variables for the template",
        (
            Source(
                "abuse/test_templates.py::test_variables_that_the_server_sets_are_not_the_clients",
                lambda m: len(m.BAD_KWARGS),
            ),
            Source("abuse/test_templates.py::test_odd_variables_are_harmless", lambda m: len(m.ODD_KWARGS)),
        ),
    ),
    "A32": (
        "a checkpoint's template",
        (Source("abuse/test_templates.py::test_an_evil_template_costs_its_own_requests"),),
    ),
    "A33": ("special tokens, spelt", (Source("abuse/test_templates.py::test_what_spells_a_special_token_is_text"),)),
    "A34": (
        "images, and other parts",
        (
            Source(IMAGES, lambda m: len(m.URLS)),
            Source("abuse/test_media.py::test_parts_that_are_no_text", lambda m: len(m.PARTS)),
        ),
    ),
    "A35": (
        "addresses to fetch from",
        (Source("abuse/test_media.py::test_nothing_is_fetched", lambda m: len(m.FORMS) * len(m.KINDS)),),
    ),
    "A36": (
        "embeddings",
        (
            Source(
                "abuse/test_media.py::test_embeddings_are_refused_by_name",
                lambda m: len(m.TENSORS) * len(m.TENSOR_FIELDS),
            ),
        ),
    ),
    "A37": (
        "adapters",
        (
            Source(
                "abuse/test_media.py::test_adapters_are_refused_by_name",
                lambda m: len(m.ADAPTERS) * len(m.ADAPTER_FIELDS),
            ),
            Source("abuse/test_media.py::test_an_adapter_as_the_model_is_not_there", lambda m: len(m.ADAPTER_MODELS)),
        ),
    ),
    "A38": (
        "cache salts",
        (
            Source("abuse/test_names.py::test_cache_salts", lambda m: len(m.SALTS) + len(m.GOOD_SALTS)),
            Source("scheduler_proc/kv/test_isolation.py::test_a_salt_that_is_too_long_is_refused_by_the_scheduler_too"),
        ),
    ),
    "A39": (
        "probes of another's cache",
        (Source("scheduler_proc/kv/test_isolation.py::test_a_probe_with_another_salt_takes_the_steps_of_a_miss"),),
    ),
    "A40": (
        "floods that evict",
        (Source("scheduler_proc/kv/test_isolation.py::test_a_flood_leaves_a_tenant_four_fifths_of_its_hits"),),
    ),
    "A41": (
        "priorities",
        (Source("launch/config/test_priority_range.py::test_a_priority_out_of_the_range_is_forbidden"),),
    ),
    "A42": (
        "ids of requests",
        (Source("abuse/test_names.py::test_ids_of_requests_are_the_servers_own", lambda m: len(m.IDS)),),
    ),
    "A43": (
        "another's request",
        (Source("abuse/test_names.py::test_nobody_elses_request_can_be_named", lambda m: 4 * len(m.WAYS_TO_NAME)),),
    ),
    "A44": (
        "keys, paths and hosts",
        (
            Source("abuse/test_routes.py::TestMatrix.test_with_a_wrong_one", lambda m: len(m.WRONG_KEYS)),
            Source(
                "abuse/test_routes.py::TestSpellings.test_no_spelling_opens_what_is_closed",
                lambda m: len(m.spellings("/v1/x")),
            ),
            Source("abuse/test_routes.py::TestSpellings.test_a_host_changes_nothing"),
        ),
    ),
    "A45": (
        "methods and upgrades",
        (
            Source("abuse/test_routes.py::TestMatrix.test_with_a_key", lambda m: len(m.METHODS) * len(m.EXPECTED)),
            Source("abuse/test_routes.py::TestMatrix.test_an_upgrade_is_no_way_in"),
        ),
    ),
    "A46": ("routes of administrators", (Source("abuse/test_routes.py::test_there_is_nothing_for_administrators"),)),
    "A47": ("streams that nobody reads", (Source(LEAVING), Source(READING))),
    "A48": (
        "queue floods",
        (
            Source("abuse/test_overload.py::TestKeyQueues.test_a_key_that_has_enough_waiting_is_told_to_wait"),
            Source("scheduler_proc/core/test_fairness.py::test_random_runs_of_several_tenants"),
        ),
    ),
    "A49": ("frames that are no messages", (Source("abuse/test_wire.py::test_well_sealed_nonsense"),)),
    "A50": ("steps that lie", (Source("abuse/test_steps.py::test_a_spoilt_step_is_refused_whole"),)),
    "A51": (
        "results that lie",
        (Source("abuse/test_results.py::test_a_wrong_result_is_refused_and_the_right_one_is_taken"),),
    ),
    "A52": (
        "checkpoints",
        (
            Source("abuse/test_checkpoints.py::test_a_header_that_lies"),
            Source("abuse/test_checkpoints.py::test_a_configuration_that_cannot_be"),
            Source("abuse/test_checkpoints.py::test_an_index_that_leads_elsewhere"),
            Source("abuse/test_checkpoints.py::test_pickled_weights_are_never_opened"),
        ),
    ),
    "A53": (
        "texts that a tokenizer finds hard",
        (
            Source("abuse/test_prompts.py::test_a_megabyte_of_it"),
            Source("launch/text/test_hard_texts.py::TestTooLong.test_a_small_part_is_tokenized"),
            Source("launch/text/test_hard_texts.py::test_a_tokenizer_that_gives_up_costs_one_request"),
        ),
    ),
    "A54": ("texts of odd characters", (Source("abuse/test_prompts.py::test_streams_of_odd_prompts_are_valid_text"),)),
    "A55": (
        "labels of metrics",
        (
            Source("abuse/test_names.py::test_a_models_name_is_one_label"),
            Source("abuse/test_log.py::TestInjection.test_a_models_name_stays_in_its_label"),
        ),
    ),
    "A56": (
        "lines of the log",
        (
            Source("abuse/test_log.py::TestInjection.test_an_errors_words_cannot_begin_a_line"),
            Source("abuse/test_log.py::TestInjection.test_nor_do_those_of_a_running_server"),
        ),
    ),
    "A57": (
        "trace files",
        (
            Source("abuse/test_trace_files.py::test_a_file_that_is_no_trace"),
            Source("abuse/test_trace_files.py::test_a_header_that_lies"),
        ),
    ),
    "A58": (
        "folders and memory made by others",
        (
            Source("abuse/test_places.py::test_a_socket_directory_that_others_can_reach"),
            Source("abuse/test_places.py::test_something_else_with_a_socket_directorys_name"),
            Source("abuse/test_places.py::test_something_else_with_the_shared_memorys_name"),
        ),
    ),
}


def table() -> str:
    """All families, as the page of the suite shows them."""
    rows = ["| family | | mutations | tests |", "|---|---|---|---|"]
    for family, (title, sources) in FAMILIES.items():
        counted = [(source, source.num_mutations()) for source in sources]
        tests = ", ".join(f"`{_short(source.test)}` {count}" for source, count in counted)
        rows.append(f"| {family} | {title} | {sum(count for _, count in counted)} | {tests} |")
    return "\n".join(rows)


def _short(test: str) -> str:
    return test.removeprefix("abuse/")
