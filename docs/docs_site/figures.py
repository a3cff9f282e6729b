"""The pictures of docs/concepts.md, as SVG."""

from __future__ import annotations

from collections.abc import Mapping

from docs_site.drawing import CODE, CONTEXT, TRAINED, Drawing


def drawings() -> Mapping[str, str]:
    """The SVG of each picture, by its name."""
    figures = {
        "data_flow": _data_flow(),
        "samples": _samples(),
        "asynchrony": _asynchrony(),
        "weight_update": _weight_update(),
        "packing": _packing(),
    }
    return {name: drawing.svg() for name, drawing in figures.items()}


def _data_flow() -> Drawing:
    d = Drawing(860, 430, "The data's way from an environment to new weights")
    d.area(10, 10, 840, 190, "rollouts: one episode")
    d.box(30, 50, 110, 54, "Environment\nan example", CODE)
    d.box(190, 50, 110, 54, "Renderer\nmessages to ids")
    d.box(350, 50, 110, 54, "Sampler\nids and logprobs")
    d.box(510, 50, 110, 54, "parse\nids to a message")
    d.box(670, 50, 160, 54, "Tools, reply\nthe next messages", CODE)
    for start in (140, 300, 460, 620):
        d.arrow((start, 77), (start + 50 if start < 620 else 670, 77))
    d.arrow((750, 104), (750, 150), (245, 150), (245, 104))
    d.text(498, 144, "next turn: the ids so far, verbatim, and what is new (a bridge)", anchor="middle")
    d.text(498, 182, "the episode ends: its turns are a trajectory, score() gives the reward", anchor="middle")
    d.area(10, 215, 840, 95, "orchestrator: a batch")
    batch = ("Group\none example", "advantages\ncredit", "filters\ndrop, and count", "strategy\nto samples")
    for i, name in enumerate(batch):
        d.box(30 + i * 206, 245, 182, 50, name)
        if i:
            d.arrow((6 + i * 206, 270), (30 + i * 206, 270))
    d.arrow((195, 200), (195, 245))
    d.area(10, 325, 840, 95, "trainer: a step")
    step = (
        "new weights\nversion n + 1",
        "optimizer\nclip, AdamW",
        "gradient\nbackward pass",
        "loss\nforward pass",
        "packing\nto micro-batches",
    )
    for i, name in enumerate(step):
        d.box(30 + i * 165, 355, 140, 50, name)
        if i:
            d.arrow((30 + i * 165, 380), (5 + i * 165, 380))
    d.arrow((760, 295), (760, 355))
    d.arrow((30, 380), (20, 380), (20, 125), (405, 125), (405, 104), dashed=True)
    return d


def _samples() -> Drawing:
    d = Drawing(860, 400, "A trajectory of three turns, and its training samples")
    d.box(640, 16, 20, 16, "", TRAINED)
    d.text(668, 29, "sampled: trained once")
    d.box(640, 40, 20, 16, "", CONTEXT)
    d.text(668, 53, "context: not trained")
    d.text(20, 30, "three turns (prompt, then completion)", bold=True)
    for i, row in enumerate(("1 2 [3]", "1 2 3 4 [5]", "1 2 8 4 [9]")):
        d.text(20, 62 + 34 * i, f"turn {i + 1}")
        d.tokens(80, 44 + 34 * i, row)
    d.text(320, 96, "turn 2 extends turn 1, id for id")
    d.text(320, 130, "turn 3 does not: 8 stands where 3 was, so this is a break")
    d.text(20, 178, 'interleaved, on_break = "split"', bold=True)
    d.tokens(80, 190, "1 2 [3] 4 [5]")
    d.text(320, 208, "turns 1 and 2 in one sample")
    d.tokens(80, 224, "1 2 8 4 [9]")
    d.text(320, 242, "a new sample begins at the break")
    d.text(20, 290, "branching", bold=True)
    for x, row in ((80, "1 2 [3]"), (190, "1 2 3 4 [5]"), (360, "1 2 8 4 [9]")):
        d.tokens(x, 302, row)
    d.text(530, 320, "one sample for each turn")
    d.text(20, 366, "Both train 3, 5 and 9 once, each in the context it was sampled in: the gradient is the same.")
    return d


def _asynchrony() -> Drawing:
    d = Drawing(860, 300, "Sampler and trainer overlap, max_async_level = 1")
    d.text(20, 78, "sampler", bold=True)
    d.text(20, 168, "trainer", bold=True)
    for i in range(5):
        x = 110 + i * 145
        d.box(x, 50, 135, 46, f"batch {i}\nbegun with version {max(0, i - 1)}", CODE)
        if i < 4:
            d.box(x + 145, 140, 135, 46, f"train batch {i}\ngives version {i + 1}", TRAINED)
            d.arrow((x + 130, 96), (x + 150, 140))
        if i < 3:
            d.arrow((x + 278, 140), (x + 295, 96), dashed=True)
    d.text(110, 216, "solid: a batch goes to the trainer.   dashed: a version of the weights goes to the sampler.")
    d.text(110, 240, "Batch 3 was begun with version 2 and is trained by version 3: most of its rollouts have age 1.")
    d.text(110, 264, "A rollout that takes long slips into a later batch and is older by one for each;")
    d.text(110, 282, "above max_off_policy_steps it is dropped as stale, and counted.")
    return d


def _weight_update() -> Drawing:
    d = Drawing(860, 300, "A weight update")
    names = ("trainer", "run folder", "orchestrator", "sampler")
    xs = (100, 320, 540, 760)
    for name, x in zip(names, xs, strict=True):
        d.box(x - 70, 14, 140, 30, name, CODE)
        d.arrow((x, 44), (x, 286), dashed=True)
    for y, a, b, text in (
        (80, 0, 1, "weights of version n + 1, whole"),
        (110, 0, 1, "its logprobs of five probes"),
        (140, 1, 2, "there is a new version"),
        (170, 2, 3, "load it, between two decode steps"),
        (230, 3, 2, "logprobs of the probes"),
    ):
        step = 4 if xs[b] > xs[a] else -4
        d.arrow((xs[a] + step, y), (xs[b] - step, y))
        d.text((xs[a] + xs[b]) / 2, y - 6, text, anchor="middle", size=11)
    d.text(752, 205, "cache: recomputed, or kept", anchor="end", size=11)
    for i, line in enumerate(("mean difference at most", "canary_tolerance: go on;", "more: the run stops")):
        d.text(532, 252 + 15 * i, line, anchor="end", size=11)
    return d


def _packing() -> Drawing:
    d = Drawing(860, 300, "Two samples as rows and as a tree")
    d.text(20, 30, "two samples that begin alike", bold=True)
    d.tokens(40, 42, "1 2 [3]")
    d.tokens(180, 42, "1 2 [4] [5]")
    d.text(20, 110, 'packing = "rows": one after the other, 7 tokens are computed', bold=True)
    d.tokens(40, 122, "1 2 [3] 1 2 [4] [5]")
    d.text(260, 140, "a token sees those before it in its own row")
    d.text(20, 190, 'packing = "tree": what they share once, 5 tokens are computed', bold=True)
    d.tokens(40, 222, "1 2")
    d.tokens(140, 206, "[3]")
    d.tokens(140, 240, "[4] [5]")
    d.arrow((96, 232), (140, 219))
    d.arrow((96, 238), (140, 253))
    d.text(260, 236, "a token sees its ancestors: 4 sees 1 and 2, not 3")
    d.text(20, 288, "Both give the same logprobs, loss and gradient; they differ only in cost.")
    return d
