"""The compiled kernel with weights in bfloat16: exact products, sums in float32, the same bits whatever is in a pass.

Tests run with the kernel as it is compiled for this processor, and for processors that cannot multiply bfloat16.
"""

import ctypes
import platform
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_agreement import play
from test_compiled_kernel import CONFIGS, hidden, make
from test_determinism import requests_of, same
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from campaigns import sized
from pairs import all_rows, pairs
from verbatim.inference.embedded.compiled import forward as compiled_forward
from verbatim.inference.embedded.compiled import library
from verbatim.inference.embedded.compiled.forward import CompiledForward
from verbatim.inference.embedded.decoder import Decoder
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.embedded.torch_forward import TorchForward
from verbatim.models import native
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model, load_weights

pytestmark = pytest.mark.realtime
BUILDS = {"as_it_is": None, "without_options": ()}
if platform.machine() in ("x86_64", "AMD64"):
    BUILDS |= {"avx512_alone": ("-march=skylake-avx512",), "avx2": ("-march=haswell",)}
    BUILDS |= {"without_tiles": ("-march=native", "-mno-amx-bf16", "-mno-amx-tile")}
OPTIMIZED = sized(("-O1",), ())
"""The builds for other processors take 17 s to compile with all optimizations, and 4 s with a few."""
TWO_BUILDS = pytest.mark.parametrize("kernel", ["as_it_is", "without_options"], indirect=True)


@pytest.fixture(scope="module", params=BUILDS)
def kernel(request):
    """The kernel's functions, compiled for this processor or for an older one."""
    if library.load_kernel() is None:
        pytest.skip("there is no C compiler here")
    options = BUILDS[request.param]
    if request.param == "without_tiles" and not library.load_kernel().verbatim_tiles():
        pytest.skip("this processor has no AMX, so this is the build as it is")
    if (
        options
        and "native" not in options[0]
        and not torch.backends.cpu.get_cpu_capability().startswith("AVX512" if "512" in options[0] else "AVX")
    ):
        pytest.skip(f"this processor cannot run {options}")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(native, "_PATIENCE", 1000)  # on a machine that does much else
        if options is not None:
            patched.setattr(native, "_VARIANTS", ((*options, *OPTIMIZED),))
            patched.setattr(library, "build", native.build.__wrapped__)
        found = library.load_kernel()
        assert found is not None
        assert options is None or not found.verbatim_tiles(), "only the build as it is has tiles"
        is_old = options is not None and "-march=native" not in options
        assert not is_old or not found.verbatim_rounds(), "older processors do not multiply bfloat16"
        yield found


def in_bfloat16(array):
    """Rounded to the nearest number with 8 bits, half-way cases to the even one: float32 with the same values."""
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32).astype(np.uint64)
    return (((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) << 16).astype(np.uint32).view(np.float32).reshape(array.shape)


def test_the_tests_own_rounding():
    given = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -(1 + 2**-9)], dtype=np.float32)
    assert in_bfloat16(given).tolist() == [1.0, 1.0, 1 + 2**-6, 1 + 2**-7, -1.0]


def test_a_kernel_for_this_processor_rounds_inputs_where_the_processor_multiplies_bfloat16():
    found = library.load_kernel()
    if found is None:
        pytest.skip("there is no C compiler here")
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            flags = next((line for line in file if line.startswith("flags")), "").split()
    except OSError:
        pytest.skip("this system does not tell what its processor has")
    assert bool(found.verbatim_rounds()) == ("avx512_bf16" in flags)
    if "amx_bf16" not in flags:
        assert not found.verbatim_tiles()


# ---- products

SIZES = [
    (1, 16, 16),
    (1, 160, 48),
    (2, 144, 64),
    (3, 32, 272),
    (5, 96, 528),
    (11, 80, 64),
    (12, 64, 1040),
    (13, 48, 96),
    (16, 176, 256),
    (25, 64, 80),
    (64, 112, 304),
]
EVERY_NUMBER_OF_ROWS = [(rows, 48 if rows % 2 else 80, 592 if rows % 3 else 96) for rows in range(1, 71)]
"""One, two and three panels (the last is not full), and numbers of inputs that are odd multiples of 16, or of 32."""


@pytest.mark.parametrize("size", [*SIZES, *EVERY_NUMBER_OF_ROWS], ids=str)
def test_a_product_is_that_of_the_rounded_weights_and_inputs(kernel, size):
    rows, columns, inputs = size
    rng = np.random.default_rng(sum(size))
    x, weight = (rng.normal(size=(n, inputs)).astype(np.float32) for n in (rows, columns))
    halves = (in_bfloat16(weight).view(np.uint32) >> 16).astype(np.uint16)
    packed = np.full(kernel.verbatim_packed(columns, inputs), 0x7FC0, dtype=np.uint16)  # NaN where nothing is written
    kernel.verbatim_pack_halves(halves.ctypes.data, columns, inputs, packed.ctypes.data)
    memory = np.empty((rows, inputs), dtype=np.uint16)
    given = in_bfloat16(x) if kernel.verbatim_rounds() else x
    # Sums in float32: at most 2^-24 of what is summed for each of the additions that follow one another.
    size_of_sums = np.abs(given).astype(np.float64) @ np.abs(in_bfloat16(weight)).astype(np.float64).T + 4
    for bias in (None, rng.normal(size=columns).astype(np.float32)):
        found = np.full((rows, columns), np.nan, dtype=np.float32)
        kernel.verbatim_product_of_halves(
            x.ctypes.data,
            packed.ctypes.data,
            None if bias is None else bias.ctypes.data,
            rows,
            columns,
            inputs,
            memory.ctypes.data,
            found.ctypes.data,
        )
        exact = given.astype(np.float64) @ in_bfloat16(weight).astype(np.float64).T + (0 if bias is None else bias)
        assert (np.abs(found - exact) <= 2.0**-24 * 32 * size_of_sums).all()


@pytest.mark.parametrize("shape", [(1, 16), (16, 32), (48, 80), (80, 592)], ids=str)
def test_pairs_of_inputs_lie_together_column_by_column_as_tiles_read_them(kernel, shape):
    columns, inputs = shape
    halves = np.arange(1, columns * inputs + 1, dtype=np.uint16).reshape(shape)
    width = kernel.verbatim_packed(1, 1)  # of a panel
    packed = np.empty(kernel.verbatim_packed(*shape), dtype=np.uint16)
    kernel.verbatim_pack_halves(halves.ctypes.data, *shape, packed.ctypes.data)
    padded = np.zeros((-(-columns // width) * width, inputs), dtype=np.uint16)
    padded[:columns] = halves
    expected = padded.reshape(-1, width, inputs // 2, 2).transpose(0, 2, 1, 3)
    assert (packed == expected.ravel()).all()


@pytest.mark.parametrize(
    ("tiles", "rounds", "path"), [(1, 1, "amx"), (0, 1, "avx512_bf16"), (0, 0, "float32")], ids=str
)
def test_a_path_is_what_processor_and_system_allow(tiles, rounds, path):
    found = SimpleNamespace(verbatim_tiles=lambda: tiles, verbatim_rounds=lambda: rounds)
    assert library.bfloat16_path(found) == path


@pytest.mark.slow
@pytest.mark.parametrize("kernel", BUILDS, indirect=True)
def test_keys_and_values_have_the_size_of_their_format(kernel, models):
    compiled = make_halves(models["tied"]).forward
    wide = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head size, bytes of a float
    assert compiled.bytes_per_token == (wide // 2 if kernel.verbatim_tiles() else wide)


@pytest.mark.parametrize("rows", [1, 2, 5, 12, 13, 16, 17, 33, 40, 70])
def test_a_rows_product_has_the_same_bits_beside_any_number_of_others(kernel, rows):
    rng = np.random.default_rng(rows)
    x, halves = rng.normal(size=(rows, 592)).astype(np.float32), np.empty((208, 592), dtype=np.uint16)
    halves[:] = in_bfloat16(rng.normal(size=halves.shape)).view(np.uint32) >> 16
    packed = np.empty(kernel.verbatim_packed(*halves.shape), dtype=np.uint16)
    kernel.verbatim_pack_halves(halves.ctypes.data, *halves.shape, packed.ctypes.data)

    def product(some):
        found, memory = np.empty((len(some), 208), dtype=np.float32), np.empty(some.shape, dtype=np.uint16)
        kernel.verbatim_product_of_halves(
            some.ctypes.data, packed.ctypes.data, None, len(some), 208, 592, memory.ctypes.data, found.ctypes.data
        )
        return found

    together = product(x)
    assert all((product(x[r : r + 1]) == together[r]).all() for r in range(rows))


# ---- whole models


def make_halves(folder, **settings):
    settings = {"max_batch_size": 6, "device": "cpu", "kernel": "compiled", "dtype": "bfloat16", **settings}
    config = TorchSettings(**settings)
    model = CausalLM(load_model(folder, dtype="bfloat16").requires_grad_(False))
    return Decoder(model, config, context_length=1200, version=0)


def _head(folder):
    return load_model(folder).get_output_embeddings().weight.detach().bfloat16()


def attention_over_rounded_keys(module, query, key, value, *args, **kwargs):
    return sdpa_attention_forward(module, query, key.bfloat16().float(), value.bfloat16().float(), *args, **kwargs)


def expected_hidden(folder, ids, *, rounds, rounds_keys):
    """`transformers` in float32 with weights rounded to bfloat16, and inputs of its layers' products, keys and values
    where asked."""
    AttentionInterface.register("rounded_keys", attention_over_rounded_keys)
    AttentionMaskInterface.register("rounded_keys", sdpa_mask)
    how = "rounded_keys" if rounds_keys else "eager"
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=how).eval()
    model.load_state_dict({k: v.bfloat16().float() for k, v in model.state_dict().items()})
    for module in model.model.modules():
        if rounds and isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16().float(),))
    with torch.inference_mode():
        return model.model(torch.from_numpy(ids)[None]).last_hidden_state[0]


@pytest.mark.slow
@TWO_BUILDS
@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_states_are_those_of_the_rounded_weights_in_float32(kernel, name, saved):
    decoder = make_halves(saved(name))
    ids = np.random.default_rng(0).integers(0, 97, 200)
    rounds, rounds_keys = bool(kernel.verbatim_rounds()), bool(kernel.verbatim_tiles())
    expected = expected_hidden(saved(name), ids, rounds=rounds, rounds_keys=rounds_keys)
    difference = (hidden(decoder.forward, ids) - expected).abs()
    # Without roundings of inputs, float32's own. With them, an input near the middle between two numbers may go either
    # way: 2^-8 of it, in a few rows. Rounding another way, or not at all, would be off in every row.
    # A rounded key or value that goes the other way reaches all later rows; keys that stay floats would be 4e-3 off.
    assert difference.median() <= (2e-3 if rounds_keys else 1e-3 if rounds else 5e-6)
    assert difference.max() <= (5e-2 if rounds else 5e-5)


@TWO_BUILDS
@pytest.mark.parametrize("name", ["llama_biases", "seven_query_heads_for_one", "a_window"])
def test_parts_neighbours_shared_pages_and_threads_change_no_bit(kernel, name, saved, monkeypatch):
    compiled = make_halves(saved(name)).forward
    ids = np.random.default_rng(1).integers(0, 97, 700)
    whole = hidden(compiled, ids)
    for start in (699, 640, 130, 7):  # from pages that slot 0 computed
        compiled.cache.truncate(0, start)
        assert torch.equal(hidden(compiled, ids, (start,)), whole[start:])
    for slot, start in ((1, 600), (2, 512), (3, 33)):
        compiled.cache.copy_prefix(0, slot, start)
    compiled.cache.truncate(0, 650)
    together = hidden(compiled, ids, (650, 600, 512, 33), (0, 1, 2, 3))
    for part, start in zip(together.split([50, 100, 188, 667]), (650, 600, 512, 33), strict=True):
        assert torch.equal(part, whole[start:])
    monkeypatch.setattr(compiled_forward, "_WORTH_A_TEAM", 0)
    torch.set_num_threads(3)
    try:
        compiled.cache.truncate(0, 0)
        assert torch.equal(hidden(compiled, ids), whole)
    finally:
        torch.set_num_threads(1)


CROWDS = (["as_it_is", "without_options"], ["tied", "untied"], [False, True])


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    ("kernel", "name", "deterministic"), sized(pairs(*CROWDS), all_rows(*CROWDS)), indirect=["kernel"]
)
def test_a_request_draws_the_same_bits_alone_and_in_a_crowd(models, name, deterministic, campaign):
    campaign("crowds beside the compiled kernel").add()
    requests, crowd = requests_of(np.random.default_rng(4), 6), requests_of(np.random.default_rng(5), 6)
    alone = [play(make_halves(models[name]), [request])[0] for request in requests]
    mixed = [request for pair in zip(crowd, requests, strict=True) for request in pair]
    assert same(play(make_halves(models[name], deterministic=deterministic), mixed)[1::2], alone)


@pytest.mark.parametrize("kernel", ["as_it_is"], indirect=True)
@pytest.mark.usefixtures("kernel")
def test_numbers_that_depend_on_the_company_are_found_out(models, monkeypatch):
    draw = CompiledForward.draw
    monkeypatch.setattr(
        CompiledForward, "draw", lambda self, states, *rest: draw(self, states * (1 + 1e-5 * (len(states) > 1)), *rest)
    )
    requests, crowd = requests_of(np.random.default_rng(4), 6), requests_of(np.random.default_rng(5), 6)
    alone = [play(make_halves(models["tied"]), [request])[0] for request in requests]
    mixed = [request for pair in zip(crowd, requests, strict=True) for request in pair]
    assert not same(play(make_halves(models["tied"]), mixed)[1::2], alone)


@TWO_BUILDS
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_recorded_logprobs_are_of_a_float32_head_over_the_rounded_weights(models, name):
    decoder = make_halves(models[name])
    requests = requests_of(np.random.default_rng(6), 6)
    compiled, weight = decoder.forward, _head(models[name]).double()
    for request, (drawn, logprobs, _) in zip(requests, play(decoder, requests), strict=True):
        if request.params.top_p < 1:
            continue
        ids = np.concatenate([request.prompt_ids, drawn]).astype(np.int64)
        compiled.cache.drop()
        states = hidden(compiled, ids)[len(request.prompt_ids) - 1 : -1]
        logits = states.double() @ weight.T / request.params.temperature
        expected = logits.log_softmax(-1).gather(1, torch.from_numpy(drawn.astype(np.int64))[:, None])[:, 0].numpy()
        assert np.abs(logprobs - expected).max() <= 1e-5


@TWO_BUILDS
@pytest.mark.usefixtures("kernel")
def test_new_weights_are_packed_anew_norms_and_tied_embeddings_too(models):
    """Every bit is that of an engine that began with the new weights."""
    ids, requests = np.arange(90) % 97, requests_of(np.random.default_rng(7), 4)
    decoder, fresh = make_halves(models["tied"]), make_halves(models["tied_later"])
    before = hidden(decoder.forward, ids)
    for module in (decoder.model, fresh.model):  # norms of new models are all 1
        load_weights(module.model, models["tied_later"])
        with torch.inference_mode():
            module.backbone.norm.weight.copy_(torch.linspace(0.5, 2, 64))
            module.backbone.layers[1].self_attn.q_norm.weight.copy_(torch.linspace(2, 0.5, 16))
    decoder.set_version(1)
    fresh.set_version(1)
    now = hidden(decoder.forward, ids)
    assert torch.equal(now, hidden(fresh.forward, ids))
    assert (now - before).abs().max() > 0.5
    assert same(play(decoder, requests), play(fresh, requests))


@TWO_BUILDS
def test_sampler_and_trainer_in_float32_stay_near_each_other(kernel, models):
    """On random models; what a pretrained one shows is in benchmarks/measured.md."""
    decoder = make_halves(models["untied"])
    assert not isinstance(decoder.forward, TorchForward)
    ids = np.random.default_rng(8).integers(0, 97, 300)
    weight = _head(models["untied"])
    with torch.inference_mode():
        ours = hidden(decoder.forward, ids) @ weight.float().T
        theirs = AutoModelForCausalLM.from_pretrained(models["untied"]).eval()(torch.from_numpy(ids)[None]).logits[0]
    difference = (ours.log_softmax(-1) - theirs.log_softmax(-1)).abs()
    assert 1e-4 < difference.mean() < 2e-2


@TWO_BUILDS
def test_float32_is_as_before_beside_it(kernel, models):
    """The same functions compute both: float32 neither rounds nor widens."""
    ids = np.random.default_rng(9).integers(0, 97, 120)
    reference = AutoModelForCausalLM.from_pretrained(models["tied"], attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = reference.model(torch.from_numpy(ids)[None]).last_hidden_state[0]
    assert (hidden(make(models["tied"]).forward, ids) - expected).abs().max() <= 5e-5


# ---- the check at the start


@TWO_BUILDS
def test_a_kernel_that_computes_something_else_is_not_used(kernel, models, monkeypatch):
    """A matrix that is packed from the wrong place."""
    pack = kernel.verbatim_pack_halves

    class Wrong:
        def __getattr__(self, name):
            return getattr(kernel, name)

        @staticmethod
        def verbatim_pack_halves(source, rows, columns, to):
            pack(source + (2 * columns if (rows, columns) == (96, 64) else 0), rows - 1, columns, to)

    monkeypatch.setattr("verbatim.inference.embedded.forward.load_kernel", Wrong)
    assert isinstance(make_halves(models["tied"], kernel="auto").forward, TorchForward)


TILE_FAULTS = {
    "rows_of_the_first_tile": ("_tile_loadd(5, x + 16 * ldx + k, 2 * ldx);", "_tile_loadd(5, x + k, 2 * ldx);"),
    "columns_of_the_next_panel": ("_tile_loadd(6, next, 4 * PANEL);", "_tile_loadd(6, at, 4 * PANEL);"),
    "keys_of_the_first_page": ("_tile_loadd(5, k[number] + d * PAGE", "_tile_loadd(5, k[0] + d * PAGE"),
    "values_of_other_columns": ("_tile_loadd(7, v + 32 * number", "_tile_loadd(7, v + 32 * (number ^ 1)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", TILE_FAULTS)
def test_a_fault_in_a_tile_is_refused(fault, models, monkeypatch):
    found = library.load_kernel()
    if found is None or not found.verbatim_tiles():
        pytest.skip("this machine has no compiler, or no AMX")
    right, wrong = (text.encode() for text in TILE_FAULTS[fault])
    (name, text), *headers = library.SOURCE.files
    assert right in text
    changed = native.CSource(name, ((name, text.replace(right, wrong)), *headers))
    monkeypatch.setattr(library, "SOURCE", changed)
    monkeypatch.setattr(native, "_VARIANTS", (("-march=native", "-fopenmp", "-O1"),))
    monkeypatch.setattr(native, "_PATIENCE", 1000)
    monkeypatch.setattr(library, "build", native.build.__wrapped__)
    assert isinstance(make_halves(models["tied"], kernel="auto").forward, TorchForward)


@TWO_BUILDS
def test_a_small_difference_is_no_rounding(kernel, models, monkeypatch):
    """Two numbers of a matrix are missing, also where inputs are rounded, which makes 5e-3 of a layer's results."""

    class Wrong:
        def __getattr__(self, name):
            return getattr(kernel, name)

        @staticmethod
        def verbatim_pack_halves(source, rows, columns, to):
            kernel.verbatim_pack_halves(source, rows, columns, to)
            if (rows, columns) == (96, 64):
                ctypes.memset(to, 0, 4)

    monkeypatch.setattr("verbatim.inference.embedded.forward.load_kernel", Wrong)
    assert isinstance(make_halves(models["tied"], kernel="auto").forward, TorchForward)
