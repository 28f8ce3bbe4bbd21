"""Measurements of the engine, beside other ways to train the same model wherever those can run.

    python -m benchmarks.cpu      beside plain PyTorch, FSDP2 and DeepSpeed on this CPU, in turn, in one run
    python -m benchmarks.publish  what that measured, as a table and a picture in the README
    python -m benchmarks.gpu      on a CUDA card: parity, link, AdamW, depths, capped memory, beside plain PyTorch
    python -m benchmarks.adamw    AdamW alone, beside plain copies, torch's and DeepSpeed's
    python -m benchmarks.dashboard_update     milliseconds and bytes of one update of the dashboard
    python -m benchmarks.dashboard_overhead   step time of a run that is watched, beside one that is not

machine     the machine in words, without its name        peers/      the engine and all others, one step each
shapes      Llama shapes, models and batches              turns       A B A B timing, and what is made of it
parity      tiny models: same losses, norms and weights   bounds      which resource a step's model says is the limit
link        both directions over the engine's own lanes   budget      what still fits into the time
apart       a contender in a process of its own           field       all of them; those that fail are named
agreement   whether they did the same work                fresh       a process with its own number of threads
readme      the README's table                            picture     its picture, drawn by plotly in Chromium
table       text tables                                   results/    JSON, one file per machine

`LOG.md` holds what was tried and what came of it, also where nothing did.
"""
