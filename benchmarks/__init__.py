"""Measurements of the engine, beside other ways to train the same model wherever those can run.

    python -m benchmarks.cpu      beside plain PyTorch, FSDP2 and DeepSpeed on this CPU, in turn, in one run
    python -m benchmarks.publish  what that measured, as a table and a picture in the README
    python -m benchmarks.gpu      on a CUDA card: parity, link, AdamW, depths, capped memory, beside plain PyTorch, and
                                  180 layers, or layers as wide as those of 120 B parameters, at virtual depth
    python -m benchmarks.adamw    AdamW alone, beside plain copies, torch's and DeepSpeed's
    python -m benchmarks.levers   each lever of the engine alone and all together, beside none
    python -m benchmarks.depth    what a layer costs in a shallow and in a deep model, really or virtually that deep
    python -m benchmarks.recording            step time of a run that is recorded and read, beside one that is not
    python -m benchmarks.dashboard_update     milliseconds and bytes of one update of the dashboard
    python -m benchmarks.dashboard_overhead   step time of a run that is watched, beside one that is not

machine     the machine in words, without its name        peers/      the engine and all others, one step each
shapes      Llama shapes and batches; models: of these    turns       A B A B timing, and what is made of it
parity      tiny models: same losses, norms and weights   bounds      which resource a step's model says is the limit
link        both directions over the engine's own lanes   budget      what still fits into the time
virtual     many layers in the host storage of a few      deep        a model at some depth, and whether it fits
wide        120B-wide layers, beside their simulation     interval    how sure a median is
apart       a contender in a process of its own           field       all of them; those that fail are named
agreement   whether they did the same work                fresh       a process with its own number of threads
readme      the README's table                            picture     its picture, drawn by plotly in Chromium
table       text tables                                   results/    JSON, one file per machine

`LOG.md` holds what was tried and what came of it, also where nothing did.
"""
