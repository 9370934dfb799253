"""Tree search by forks: keep the most likely answers so far, drop the others, and let each kept one branch.

python -P docs/tree_search.py "Once upon a time"
"""

import random
import sys

from quire import LLM, SamplingParams
from quire.launch.offline.running import RunningRequest

KEPT, BRANCHES, STEP, DEPTH = 2, 4, 12, 5


def mean_logprob(node: RunningRequest, num_tokens: int) -> float:
    pairs = list(zip(node.output.logprobs or [], node.output.token_ids, strict=True))[:num_tokens]
    return sum(entry[token].logprob for entry, token in pairs) / max(len(pairs), 1)


def search(llm: LLM, prompt: str, seed: int | None = None) -> str:
    seeds = random.Random(seed)  # one for each fork, so that no two answers draw the same numbers
    params = SamplingParams(temperature=1.0, max_tokens=STEP * DEPTH, logprobs=0, seed=seeds.getrandbits(64))
    nodes = [llm.start(prompt, params)]
    for length in range(0, STEP * (DEPTH - 1), STEP):
        for node in [node for node in nodes if not node.finished]:
            nodes += llm.fork(node, BRANCHES - 1, num_tokens=length, seed=seeds.getrandbits(64))
        for node in nodes:
            node.read(length + STEP)
        nodes.sort(key=lambda node: mean_logprob(node, length + STEP), reverse=True)  # it may have more tokens
        while len(nodes) > KEPT:
            nodes.pop().abort()
    return max(nodes, key=lambda node: mean_logprob(node, len(node.read().token_ids))).output.text


if __name__ == "__main__":
    with LLM() as llm:
        print(search(llm, sys.argv[1]))
