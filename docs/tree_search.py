"""Tree search by forks: keep the most likely answers so far, drop the others, and let each kept one branch.

python -P docs/tree_search.py "Once upon a time"
"""

import sys

from quire import LLM, SamplingParams
from quire.launch.offline.running import RunningRequest

KEPT, BRANCHES, STEP, DEPTH = 2, 4, 12, 5


def mean_logprob(node: RunningRequest) -> float:
    return (node.output.cumulative_logprob or 0.0) / max(len(node.output.token_ids), 1)


def search(llm: LLM, prompt: str) -> str:
    nodes = [llm.start(prompt, SamplingParams(temperature=1.0, max_tokens=STEP * DEPTH, logprobs=0))]
    for depth in range(1, DEPTH):
        running = [node for node in nodes if not node.finished]
        nodes += [child for node in running for child in llm.fork(node, BRANCHES - 1)]
        for node in nodes:
            node.read(depth * STEP)
        nodes.sort(key=mean_logprob, reverse=True)
        while len(nodes) > KEPT:
            nodes.pop().abort()
    return max(nodes, key=lambda node: (node.read(), mean_logprob(node))[1]).output.text


if __name__ == "__main__":
    with LLM() as llm:
        print(search(llm, sys.argv[1]))
