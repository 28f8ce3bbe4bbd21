"""Measurements of the engine, beside plain Hugging Face training wherever that can run.

    python -m benchmarks.cpu      against plain PyTorch on this CPU, in turn, in one run
    python -m benchmarks.gpu      on a CUDA card: parity, link, AdamW, depths, capped memory, beside plain PyTorch, and
                                  180 layers, or layers as wide as those of 120 B parameters, at virtual depth
    python -m benchmarks.adamw    AdamW alone, beside plain copies
    python -m benchmarks.depth    what a layer costs in a shallow and in a deep model, really or virtually that deep
    python -m benchmarks.recording            step time of a run that is recorded and read, beside one that is not
    python -m benchmarks.dashboard_update     milliseconds and bytes of one update of the dashboard
    python -m benchmarks.dashboard_overhead   step time of a run that is watched, beside one that is not

machine     the machine in words, without its name        contenders  the engine and plain training, one step each
shapes      Llama shapes, models and batches              turns       A B A B timing, and what is made of it
parity      tiny models: same losses, norms and weights   bounds      which resource a step's model says is the limit
link        both directions over the engine's own lanes   budget      what still fits into the time
virtual     many layers in the host storage of a few      deep        a model at some depth, and whether it fits
wide        120B-wide layers, beside their simulation     interval    how sure a median is
table       text tables                                   results/    JSON, one file per machine

`LOG.md` holds what was tried and what came of it, also where nothing did.
"""
