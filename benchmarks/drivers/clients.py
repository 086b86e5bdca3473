"""Serve workloads from standard input with an engine that goes step by step; results go to standard output, as JSON lines.

It runs under the interpreter of a peer's own environment, so it imports nothing of this project. What comes in and goes out:

    in   {"requests": [{"index": 0, "prompt": [1, 2], "output_length": 4, "arrival": 0.0}, ...], "concurrency": 8}
    out  {"ready": notes}            once, when the model is loaded
         {"progress": 3}             more tokens are done, while a workload runs
         {"rows": [{"index": 0, "sent_at": s, "tokens": [...], "times": [...]}, ...], "wall_seconds": s, "steps": 9}

Times are on `time.perf_counter()`'s clock, which all processes of one machine share. Between workloads it waits for a line.
"""

import heapq
import json
import os
import sys
import time

_PROGRESS_SECONDS = 0.25


def main(make_engine):
    """`make_engine(settings)`, with the settings of the first argument, returns an engine of three methods.

    `add(index, prompt, output_length)`; `step()`, which returns (index, new tokens) pairs; and `notes()`.
    """
    with os.fdopen(os.dup(1), "w") as results:
        os.dup2(2, 1)  # whatever a library prints goes to the log

        def send(message):
            results.write(json.dumps(message) + "\n")
            results.flush()

        engine = make_engine(json.loads(sys.argv[1]))
        send({"ready": engine.notes()})
        for line in sys.stdin:
            message = json.loads(line)
            send(serve(engine, message["requests"], message["concurrency"], lambda tokens: send({"progress": tokens})))


def serve(engine, requests, concurrency, progress):
    """Send each request at its arrival, or as soon after as one of `concurrency` clients is free; step until all are done."""
    waiting = list(reversed(requests))
    left = {}  # index -> tokens to come, of those that are with the engine
    rows = {}
    start = told_at = time.perf_counter()
    free_since = [start] * concurrency  # a heap: the moments at which the idle clients fell idle
    steps = untold = 0
    while waiting or left:
        while waiting and free_since and start + waiting[-1]["arrival"] <= time.perf_counter():
            request = waiting.pop()
            sent_at = max(start + request["arrival"], heapq.heappop(free_since))
            rows[request["index"]] = {"index": request["index"], "sent_at": sent_at, "tokens": [], "times": []}
            left[request["index"]] = request["output_length"]
            engine.add(request["index"], request["prompt"], request["output_length"])
        if not left:
            time.sleep(max(0.0, start + waiting[-1]["arrival"] - time.perf_counter()))
            continue
        outputs = engine.step()
        now = time.perf_counter()
        steps += 1
        for index, tokens in outputs:
            rows[index]["tokens"] += tokens
            rows[index]["times"] += [now] * len(tokens)
            left[index] -= len(tokens)
            untold += len(tokens)
            if left[index] <= 0:
                del left[index]
                heapq.heappush(free_since, now)
        if untold and now - told_at > _PROGRESS_SECONDS:
            progress(untold)
            untold, told_at = 0, now
    return {"rows": list(rows.values()), "wall_seconds": time.perf_counter() - start, "steps": steps}
