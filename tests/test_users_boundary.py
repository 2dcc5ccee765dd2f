"""What breaks for users of JAX, torch, DLPack and Triton together, with right answers: sharing, layouts, donation, streams."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from oracle import checksum_greedy, config, output

import funcspec as fs
from funcspec import noise
from funcspec.drafters import standalone
from funcspec.errors import ArgumentError, ArgumentTypeError, DonatedStateError
from funcspec.interop import jax_model, lift
from funcspec.kernels._triton import HAS_TRITON, jit, tl
from funcspec.kernels.choose_tokens import choose_tokens_, choose_tokens_partials
from funcspec.kernels.kv_cache import write_kv_
from funcspec.kernels.next_tokens import prepare_next_token_padded_
from funcspec.kernels.noise import noise_words_
from funcspec.kernels.op import Op
from funcspec.models import ChecksumDraft, ChecksumModel

DEVICE = "cuda" if jax.default_backend() == "gpu" else "cpu"
PROMPTS = [[5, 6, 7], [1]]
COUPLED = fs.rules.coupled

pytestmark = pytest.mark.skipif(DEVICE == "cpu" and torch.cuda.is_available(), reason="JAX and torch see other devices")
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
on_the_host = pytest.mark.skipif(DEVICE == "cuda", reason="NumPy arrays and torch views of them lie on the host")


def started(framework: str, prompts: list[list[int]], **settings: Any) -> tuple[fs.SpecState, Any, Any]:
    made = jax_model if framework == "jax" else lambda model: model
    target, drafter = made(ChecksumModel(spread=True)), standalone(made(ChecksumDraft(spread=True)))
    state = fs.init(config(**({"rows": len(prompts), "length": 32, "rule": COUPLED, "device": DEVICE} | settings)), target, drafter)
    options: dict[str, Any] = {"seeds": range(len(prompts)), "temperature": 1.0, "max_tokens": 16}
    return fs.admit(state, target, drafter, prompts, **options)[0], target, drafter


def by_torch(*, seed: Any = None, positions: Any = None, out: Any = None, count: int = 4) -> np.ndarray:
    """Noise words for token 0 by a kernel of torch."""
    zeros = torch.zeros(count, dtype=torch.int32)
    out = torch.full((count,), -77, dtype=torch.int32) if out is None else out
    positions = zeros if positions is None else positions
    seed = torch.zeros(count, 2, dtype=torch.int32) if seed is None else seed
    noise_words_(seed=seed, positions=positions, nonces=zeros, stream=noise.TARGET, token_ids=zeros, out_words=out)
    return out.numpy().view(np.uint32)


def by_jax(*, seed: Any = None, positions: Any = None, count: int = 4) -> np.ndarray:
    """The same by the lifted kernel."""
    zeros = np.zeros((count, 2), np.int32)
    arrays = {"positions": zeros[:, 0] if positions is None else positions, "seed": zeros if seed is None else seed}
    fixed = {"stream": noise.TARGET, "nonces": zeros[:, 0], "token_ids": zeros[:, 0]}
    found = lift(noise_words_)(**arrays, **fixed, out_words=jax.ShapeDtypeStruct((count,), jnp.int32))
    return np.asarray(found["out_words"]).view(np.uint32)


def expected_words(*, seed: Any = None, positions: Any = None, count: int = 4) -> np.ndarray:
    """The same by definition."""
    keys = np.zeros((count, 2), np.int32) if seed is None else np.array(seed)
    at = np.zeros(count, np.int32) if positions is None else np.array(positions)
    low, high, at, zero = (noise.as_words(array) for array in (keys[:, 0], keys[:, 1], at, np.zeros(count, np.int32)))
    return noise.token_words(low, high, at, zero, noise.TARGET, zero)


def right_or_refused(call: Callable[[], Any], expected: Any, refusal: str) -> bool:
    """Whether a call gives what is expected or says what it cannot do."""
    try:
        found = call()
    except (ArgumentError, ValueError) as error:  # the latter is torch's own about negative strides
        return refusal in str(error) or "negative" in str(error)
    return bool(np.array_equal(found, expected))


# ---------------------------------------------------------------- who shares what


@on_the_host
def test_m1_arrays_of_the_caller_are_bit_equal_after_any_step() -> None:
    """M1: arange(4) of int32, in JAX and through a torch view of it, read by a kernel; to be written it is refused."""
    x = jnp.arange(4, dtype=jnp.int32)
    view = torch.from_dlpack(x)
    for found in (by_torch(positions=x), by_torch(positions=view), by_jax(positions=x)):
        assert (found == expected_words(positions=range(4))).all()
    with pytest.raises(ArgumentTypeError, match="out_words: expected a buffer that may be written in place"):
        by_torch(positions=view, out=x)
    assert x.tolist() == [0, 1, 2, 3] == view.tolist()


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_m1_arrays_put_into_a_state_are_left_alone(framework: str) -> None:
    """M1: fields, numbers of drafts and logits that the caller made, in pure and donated steps."""
    for donate in (False, True):
        state, target, drafter = started(framework, PROMPTS)
        made = partial(torch.tensor, device=DEVICE) if framework == "torch" else jnp.array
        int32 = torch.int32 if framework == "torch" else jnp.int32
        own = {"draft_len": made([3, 1], dtype=int32), "num_tokens": made([4, 2], dtype=int32), "num_draft": made([0, 0], dtype=int32)}
        wanted = made([3, 2], dtype=int32)
        state, _ = fs.prefill(dataclasses.replace(state, **own), drafter, num_draft=wanted, donate=donate)
        state, _ = fs.decode(state, drafter, donate=donate)
        state, scores = fs.score(state, target, donate=donate)
        logits = scores.logits + 0
        kept = logits.tolist()
        state, _ = fs.accept(state, dataclasses.replace(scores, logits=logits), donate=donate)
        fs.step_round(state, target, drafter, num_draft=wanted, donate=donate)
        assert {name: array.tolist() for name, array in own.items()} == {"draft_len": [3, 1], "num_tokens": [4, 2], "num_draft": [0, 0]}
        assert wanted.tolist() == [3, 2] and logits.tolist() == kept


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("rows", [8, 100])
def test_m2_a_state_made_of_numpy_does_not_change_with_it(framework: str, rows: int) -> None:
    """M2: float32 arrays of 100 and of 8. A step's result never shares memory with what a field was made of."""
    target = jax_model(ChecksumModel()) if framework == "jax" else ChecksumModel()
    state = fs.init(config(rows=rows, length=16, drafts=1, rule=COUPLED, block_size=16, device=DEVICE), target)
    held = fs.snapshot(state)
    heat = held.fields["temperature"]
    heat.flags.writeable = True
    heat[:] = 0.5
    restored = fs.restore(held, framework=framework)
    room = np.zeros(rows + 16, np.float32)
    aligned = room[(-room.ctypes.data % 64) // 4 :][:rows]  # on a boundary of 64 bytes, where JAX would share it
    aligned[:] = 0.5
    given = torch.from_numpy(aligned).to(DEVICE) if framework == "torch" else aligned
    stepped, _ = fs.verify(dataclasses.replace(state, temperature=given), target)
    heat[:], aligned[:] = 9.0, 9.0
    for one in (restored, stepped):
        assert one.temperature.shape == (rows,) and set(one.temperature.tolist()) == {0.5}


def test_m2_prompts_and_settings_are_read_once() -> None:
    target = ChecksumModel()
    prompt, seeds, heat = np.array([5, 6, 7]), [3], [0.7]
    state, _ = fs.admit(fs.init(config(rule=COUPLED), target), target, None, [prompt], seeds=seeds, temperature=heat)
    before = fs.snapshot(state)
    prompt[:], seeds[0], heat[0] = 0, 9, 0.0
    assert fs.snapshot(state) == before and state.tokens[0, :3].tolist() == [5, 6, 7]


# ---------------------------------------------------------------- layouts


def layouts() -> dict[str, tuple[str, np.ndarray]]:
    many = np.arange(20, 28, dtype=np.int32)
    return {
        "transposed": ("seed", many[:6].reshape(2, 3).T),
        "every other": ("positions", many[::2]),
        "expanded": ("positions", np.broadcast_to(np.int32(21), (4,))),
        "flipped": ("positions", many[4:][::-1]),
    }


@on_the_host
@pytest.mark.parametrize("name", list(layouts()))
def test_m3_odd_layouts_are_right_or_refused(name: str) -> None:
    """M3: (2, 3) transposed, every other element, an expanded and a flipped array, to a kernel of torch and lifted."""
    argument, array = layouts()[name]
    count, given = len(array), {argument: array}
    expected = expected_words(**given, count=count)
    assert len(set(expected.tolist())) == (1 if name == "expanded" else count)
    assert (by_jax(**given, count=count) == expected).all()
    assert right_or_refused(lambda: by_torch(**given, count=count), expected, f"{argument}: expected")
    if name != "flipped":  # torch has no negative strides
        same = torch.from_numpy(array.base if name == "every other" else array.copy())
        view = {"transposed": lambda: same.t().contiguous().t(), "every other": lambda: same[::2], "expanded": lambda: same[:1].expand(4)}
        odd = view[name]()
        assert odd.tolist() == array.tolist() and not odd.is_contiguous()
        assert right_or_refused(lambda: by_torch(**{argument: odd}, count=count), expected, f"{argument}: expected")


def test_m3_logits_of_any_row_stride(backend: str, kernel_device: str) -> None:
    """M3: (2, 3) transposed is refused, rows two apart and one row for all are right."""
    if kernel_device != DEVICE:
        pytest.skip("JAX and torch see other devices")
    base = torch.tensor([[0.0, 3.0, 1.0], [9.0, 9.0, 9.0], [2.0, 0.0, 5.0], [9.0, 9.0, 9.0]], device=kernel_device)

    def choose(logits: torch.Tensor) -> list[int]:
        count, parts = logits.shape[0], choose_tokens_partials(logits.shape[1])
        ints = torch.full((5, count), -77, dtype=torch.int32, device=kernel_device)
        ints[0] = torch.arange(count)
        choose_tokens_(
            backend=backend,
            logits=logits,
            logits_indices=None,
            token_rows=ints[0],
            positions=ints[0],
            temperature=torch.zeros(count, device=kernel_device),
            seed=torch.zeros(count, 2, dtype=torch.int32, device=kernel_device),
            stream=noise.TARGET,
            nonce_length=None,
            token_ids=None,
            out_tokens=ints[1],
            out_bad=ints[2],
            scratch_scores=torch.zeros(count, parts, device=kernel_device),
            scratch_tokens=ints[3].view(count, parts),
            scratch_bad=ints[4].view(count, parts),
        )
        return ints[1].tolist()

    assert choose(base[::2]) == [1, 2] and choose(base[:1].expand(3, 3)) == [1, 1, 1]
    with pytest.raises(ArgumentError, match=r"logits: expected consecutive columns"):
        choose(base[:2].T)


@pytest.mark.parametrize("layout", ["every other", "expanded"])
def test_m3_numbers_of_drafts_with_gaps(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """M3: what a caller passes as `num_draft`, with the kernels that a GPU runs."""
    state, _, drafter = started("torch", [[5, 6, 7], [1], [8, 8]])
    gaps = torch.tensor([3, 0, 2, 0, 1, 0], dtype=torch.int32, device=DEVICE)
    wanted, expected = (gaps[::2], [3, 2, 1]) if layout == "every other" else (gaps[2:3].expand(3), [2, 2, 2])
    chosen = Op.__call__
    monkeypatch.setattr(Op, "__call__", lambda op, *, backend=None, **arguments: chosen(op, backend="triton", **arguments))
    found = right_or_refused(lambda: fs.prefill(state, drafter, num_draft=wanted)[1].num_draft.tolist(), expected, "num_draft: expected")
    assert found


@pytest.mark.parametrize("shape", [(1, 3, 5, 8), (1, 4, 1, 1)])
def test_m4_dimensions_of_size_1_stay_in_place(shape: tuple[int, ...]) -> None:
    """M4: caches of (1, 3, 5, 8) and (1, 4, 1, 1) cross to torch and back, and through a lifted kernel, without a copy."""
    blocks, size, heads, dim = shape
    caches = tuple(jnp.full(shape, value, jnp.float32) for value in (1.0, 2.0))
    expected = [np.full((blocks * size, heads, dim), value, np.float32) for value in (1.0, 2.0)]
    new = jnp.arange(3, heads * dim + 3, dtype=jnp.float32).reshape(1, heads, dim)
    addresses = [cache.unsafe_buffer_pointer() for cache in caches]
    for cache, address in zip(caches, addresses, strict=True):
        view = torch.from_dlpack(cache)
        back = jnp.from_dlpack(view)
        assert view.shape == back.shape == shape and view.data_ptr() == back.unsafe_buffer_pointer() == address
    del view, back

    @partial(jax.jit, donate_argnums=0)
    def write(caches: tuple[jax.Array, ...], slot: jax.Array) -> tuple[jax.Array, ...]:
        out = lift(write_kv_)(out_key_cache=caches[0], out_value_cache=caches[1], key=new, value=-new, slot_mapping=slot)
        return out["out_key_cache"], out["out_value_cache"]

    for slot in (1, 2):
        caches = write(caches, jnp.array([slot], jnp.int32))
        expected[0][slot], expected[1][slot] = new[0], -new[0]
    assert [cache.unsafe_buffer_pointer() for cache in caches] == addresses
    for cache, right in zip(caches, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(cache).reshape(right.shape), right)


def test_m4_a_state_of_one_row_stays_in_place() -> None:
    state, _, drafter = started("jax", [[5, 6, 7]], block_size=1)
    program = jax.jit(lambda state: fs.prefill(state, drafter)[0], donate_argnums=0)
    expected = fs.snapshot(fs.prefill(state, drafter)[0])
    addresses = sorted(leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state))
    state = program(state)
    assert fs.snapshot(state) == expected
    assert sorted(leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)) == addresses


@on_the_host
def test_m5_read_only_arrays_are_taken() -> None:
    """M5: `np.asarray(jax_array)` cannot be written; it is read, and refused where a kernel would write."""
    positions = np.asarray(jnp.arange(4, dtype=jnp.int32))
    assert not positions.flags.writeable
    for found in (by_torch(positions=positions), by_jax(positions=positions)):
        assert (found == expected_words(positions=range(4))).all()
    with pytest.raises(ArgumentTypeError, match="out_words: expected a buffer that may be written in place, got ndarray"):
        by_torch(out=positions)
    target = ChecksumModel()
    state, _ = fs.admit(fs.init(config(), target), target, None, [np.asarray(jnp.array([5, 6, 7]))])
    assert output(state, 0) == checksum_greedy([5, 6, 7], 1)
    held = fs.snapshot(state)
    assert not any(values.flags.writeable for values in held.fields.values()) and fs.snapshot(fs.restore(held, framework="jax")) == held


def test_m6_masks_of_bool_cross() -> None:
    """M6: a mask of JAX, read by a kernel of torch, eagerly and in a program; and to torch and back."""
    mask = jnp.array([True, False, True])
    arrays = {
        "sampled_token_ids": jnp.array([[7, -1], [5, 6], [1, 2]], jnp.int32),
        "discard_request_mask": mask,
        "backup_next_token_ids": jnp.array([10, 20, 30], jnp.int32),
    }
    outputs = {name: jax.ShapeDtypeStruct((3,), jnp.int32) for name in ("out_next_token_ids", "out_valid_sampled_tokens_count")}
    call = partial(lift(prepare_next_token_padded_), vocab_size=100, **outputs)
    for found in (call(**arrays), jax.jit(lambda arrays: call(**arrays))(arrays)):
        assert found["out_next_token_ids"].tolist() == [10, 6, 30] and found["out_valid_sampled_tokens_count"].tolist() == [0, 2, 0]
    back = jnp.from_dlpack(torch.from_dlpack(mask))
    assert back.dtype == jnp.bool_ and back.tolist() == [True, False, True]


# ---------------------------------------------------------------- order, zeroes, donation


def add_one(*, x: torch.Tensor) -> None:
    x += 1


ADD_ONE = Op("add_one", writes=("x",), triton=add_one, reference=add_one)


@pytest.mark.gpu
@needs_gpu
def test_m7_kernels_wait_for_the_arrays_they_read() -> None:
    """M7: a long computation of JAX, and a kernel on its result at once; 200 of 200 equal the version that waits."""

    @jax.jit
    def long(seed: jax.Array) -> jax.Array:
        x = jnp.full((1024, 1024), 1e-3, jnp.float32) + seed * 1e-6
        return jax.lax.fori_loop(0, 30, lambda _, y: jnp.tanh(y @ x), x)

    for number in range(200):
        result = long(jnp.float32(number))
        found = lift(ADD_ONE)(x=result)["x"]
        after = np.asarray(found * 2)
        np.testing.assert_array_equal(after, (np.asarray(jax.block_until_ready(long(jnp.float32(number)))) + np.float32(1)) * 2)


def test_m8_buffers_that_are_read_and_written_are_never_zeroed() -> None:
    """M8: fives, and a kernel that adds 1: sixes, eagerly, in a program, and in the very buffer where that is donated."""
    fives = jnp.full((9,), 5, jnp.int32)
    for call in (lift(ADD_ONE), lambda x: jax.jit(lambda x: lift(ADD_ONE)(x=x))(x)):
        assert call(x=fives)["x"].tolist() == [6] * 9 and fives.tolist() == [5] * 9
    given = fives + 0
    address = given.unsafe_buffer_pointer()
    found = jax.jit(lambda x: lift(ADD_ONE)(x=x)["x"], donate_argnums=0)(given)
    assert found.tolist() == [6] * 9 and found.unsafe_buffer_pointer() == address and given.is_deleted()


def test_m9_the_order_of_results_does_not_matter_to_donation() -> None:
    """M9: a donated round that returns (verdict, state), and one that returns (state, verdict)."""
    start, target, drafter = started("jax", PROMPTS)
    ends = []
    for turn in (
        lambda state: fs.step_round(state, target, drafter),
        lambda state: fs.step_round(state, target, drafter)[::-1],
    ):
        program, state, verdicts = jax.jit(turn, donate_argnums=0), fs.fork(start), []
        for _ in range(3):
            found = program(state)
            state, verdict = found if isinstance(found[0], fs.SpecState) else found[::-1]
            verdicts.append(verdict.tokens.tolist())
        ends.append((fs.snapshot(state), verdicts))
    assert ends[0] == ends[1]
    plain, verdicts = start, []
    for _ in range(3):
        plain, verdict = fs.step_round(plain, target, drafter)
        verdicts.append(verdict.tokens.tolist())
    assert (fs.snapshot(plain), verdicts) == ends[0]


def test_m10_a_state_is_consumed_once() -> None:
    """M10: the second use of a donated state is an error of Python that says what happened."""
    state, target, drafter = started("torch", PROMPTS)
    fs.step_round(state, target, drafter, donate=True)
    for use in (lambda: fs.step_round(state, target, drafter, donate=True), lambda: fs.snapshot(state), lambda: state.tokens):
        with pytest.raises(DonatedStateError, match=r"consumed by prefill #\d+ \(donate=True\)\. Fix: use the state that step returned"):
            use()
    start, target, drafter = started("jax", PROMPTS)
    program = jax.jit(fs.prefill, donate_argnums=0)
    program(start, drafter)
    with pytest.raises((RuntimeError, ValueError), match=r"deleted|donated"):
        program(start, drafter)


# ---------------------------------------------------------------- Triton and pinned memory


@jit
def masked_load_kernel(x_ptr, out_ptr, count, LANES: tl.constexpr):  # noqa: N803
    lane = tl.arange(0, LANES)
    tl.store(out_ptr + lane, tl.load(x_ptr + lane, mask=lane < count, other=0))


@jit
def masked_store_kernel(out_ptr, wanted):
    tl.store(out_ptr, 9, mask=wanted != 0)


@jit
def load_bfloat16_kernel(x_ptr, out_ptr, LANES: tl.constexpr):  # noqa: N803
    lane = tl.arange(0, LANES)
    tl.store(out_ptr + lane, tl.load(x_ptr + lane).to(tl.float32))


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_m12_masks_scalars_and_bfloat16_in_kernels(kernel_device: str) -> None:
    """M12: a masked load with other=0 gives 0, a masked scalar store stores nothing, and bfloat16 is exact."""
    ones = torch.ones(4, dtype=torch.int32, device=kernel_device)
    out = torch.full((4,), -77, dtype=torch.int32, device=kernel_device)
    masked_load_kernel[(1,)](ones, out, 2, LANES=4)
    assert out.tolist() == [1, 1, 0, 0]
    for wanted, expected in ((0, [1, 1, 0, 0]), (2, [9, 1, 0, 0])):
        masked_store_kernel[(1,)](out, wanted)
        assert out.tolist() == expected
    values = torch.tensor([1.0, -2.5, 3.140625, 1e30], dtype=torch.bfloat16, device=kernel_device)
    floats = torch.zeros(4, device=kernel_device)
    load_bfloat16_kernel[(1,)](values, floats, LANES=4)
    assert torch.equal(floats, values.float())


@pytest.mark.gpu
@needs_gpu
def test_m13_pinned_tensors_are_copied_or_refused() -> None:
    """M13: a pinned int32 tensor as a number of drafts is on the host, and refused; lifted kernels take its values."""
    state, _, drafter = started("torch", PROMPTS)
    pinned = torch.tensor([3, 1], dtype=torch.int32).pin_memory()
    with pytest.raises(ArgumentError, match=r"num_draft: expected an int32 tensor \[2\] on cuda, got \[2\] torch\.int32 on cpu"):
        fs.prefill(state, drafter, num_draft=pinned)
    assert fs.prefill(state, drafter, num_draft=pinned.tolist())[1].num_draft.tolist() == [3, 1]
    assert lift(ADD_ONE)(x=jnp.array(pinned.numpy()))["x"].tolist() == [4, 2] and pinned.tolist() == [3, 1]
