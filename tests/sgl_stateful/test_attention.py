"""`portable_cpu` attention against SGLang's `torch_native` and against the definition in fp64."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sgl_stateful.sglang_adapter.attention import PortableCpuAttention, UnsupportedAttention
from sgl_stateful.sglang_adapter.attention_plan import plan_extend

HEAD_DIM = 64
NUM_SLOTS = 4096
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Sequence:
    """Tokens [prefix, prefix + extend) of a row; the prefix is in the cache."""

    row: int
    prefix: int
    extend: int

    @property
    def end(self) -> int:
        return self.prefix + self.extend


class Scene:
    """A pool whose unallocated slots hold NaN, rows of slots, and one forward over some sequences."""

    def __init__(
        self,
        sequences: list[Sequence],
        *,
        dtype: torch.dtype = torch.float32,
        heads: tuple[int, int] = (9, 3),
        permuted: bool = True,
        page_size: int = 1,
        decode: bool = False,
    ) -> None:
        torch.manual_seed(7)
        self.sequences, self.heads, self.dtype = sequences, heads, dtype
        num_heads, num_kv_heads = heads
        self.layer = RadixAttention(num_heads, HEAD_DIM, HEAD_DIM**-0.5, num_kv_heads, 0)
        self.rows = ReqToTokenPool(size=16, max_context_len=2048, device="cpu", enable_memory_saver=False)
        self.pool = MHATokenToKVPool(
            size=NUM_SLOTS,
            page_size=page_size,
            dtype=dtype,
            head_num=num_kv_heads,
            head_dim=HEAD_DIM,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
        )
        self.runner = SimpleNamespace(
            device="cpu",
            dtype=dtype,
            use_mla_backend=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool=self.pool,
        )
        self.rows.req_to_token.fill_(NUM_SLOTS - 1)  # never allocated: holds NaN
        slots = torch.randperm(NUM_SLOTS - 2) + 1 if permuted else torch.arange(1, NUM_SLOTS - 1)
        slots = slots[: (len(slots) // page_size) * page_size]
        for row in {sequence.row for sequence in sequences}:
            length = max(sequence.end for sequence in sequences if sequence.row == row)
            taken, slots = slots[:length], slots[-(-length // page_size) * page_size :]
            self.rows.req_to_token[row, :length] = taken.int()
        self.keys, self.values = self.pool.get_key_buffer(0), self.pool.get_value_buffer(0)
        self.keys.fill_(float("nan"))
        self.values.fill_(float("nan"))
        new = [self.slots(sequence)[sequence.prefix :] for sequence in sequences]
        for row in {sequence.row for sequence in sequences}:
            length = max(sequence.end for sequence in sequences if sequence.row == row)
            cached = self.rows.req_to_token[row, :length].long()
            self.keys[cached] = torch.randn(length, num_kv_heads, HEAD_DIM).to(dtype)
            self.values[cached] = torch.randn(length, num_kv_heads, HEAD_DIM).to(dtype)
        self.out_cache_loc = torch.cat(new)
        num_tokens = self.out_cache_loc.numel()
        self.q = torch.randn(num_tokens, num_heads * HEAD_DIM).to(dtype)
        self.k = torch.randn(num_tokens, num_kv_heads, HEAD_DIM).to(dtype)
        self.v = torch.randn(num_tokens, num_kv_heads, HEAD_DIM).to(dtype)
        self.keys[self.out_cache_loc] = float("nan")
        self.values[self.out_cache_loc] = float("nan")
        lens = torch.tensor([sequence.end for sequence in sequences])
        mode = ForwardMode.DECODE if decode else ForwardMode.EXTEND
        self.batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(sequences),
            input_ids=torch.zeros(num_tokens, dtype=torch.int64),
            req_pool_indices=torch.tensor([sequence.row for sequence in sequences]),
            seq_lens=lens,
            out_cache_loc=self.out_cache_loc,
            seq_lens_sum=int(lens.sum()),
        )
        if not decode:
            self.batch.extend_prefix_lens = torch.tensor([sequence.prefix for sequence in sequences])
            self.batch.extend_seq_lens = torch.tensor([sequence.extend for sequence in sequences])

    def slots(self, sequence: Sequence) -> Tensor:
        return self.rows.req_to_token[sequence.row, : sequence.end].long()

    def run(self, backend_class: Any) -> Tensor:
        backend = backend_class(self.runner)
        backend.init_forward_metadata(self.batch)
        return backend.forward(self.q, self.k, self.v, self.layer, self.batch)

    def expected(self) -> Tensor:
        """Definition of causal attention in fp64, token by token, after the new keys and values were stored."""
        num_heads, num_kv_heads = self.heads
        out, at = [], 0
        for sequence in self.sequences:
            k, v = (pool[self.slots(sequence)].double() for pool in (self.keys, self.values))
            for position in range(sequence.prefix, sequence.end):
                for head in range(num_heads):
                    query = self.q[at].view(num_heads, HEAD_DIM)[head].double()
                    kv_head = head // (num_heads // num_kv_heads)
                    scores = k[: position + 1, kv_head] @ query * HEAD_DIM**-0.5
                    out.append(scores.softmax(0) @ v[: position + 1, kv_head])
                at += 1
        return torch.stack(out).view(at, num_heads * HEAD_DIM)


FORWARDS = {
    "prefill": [Sequence(1, 0, 70)],
    "prefill of several": [Sequence(1, 0, 5), Sequence(4, 0, 1), Sequence(2, 0, 40)],
    "extend": [Sequence(3, 200, 25)],
    "long extend": [Sequence(3, 30, 90)],
    "extend by one": [Sequence(3, 150, 1)],
    "mixed": [Sequence(2, 0, 12), Sequence(5, 130, 20), Sequence(1, 77, 1), Sequence(7, 64, 33)],
}

DECODES = {
    "one": [Sequence(1, 120, 1)],
    "equal": [Sequence(1, 99, 1), Sequence(2, 99, 1), Sequence(3, 99, 1)],
    "similar": [Sequence(4, 99, 1), Sequence(2, 80, 1), Sequence(3, 101, 1)],
    "apart": [Sequence(4, 300, 1), Sequence(2, 0, 1), Sequence(3, 290, 1), Sequence(6, 20, 1)],
}


def check(scene: Scene) -> None:
    ours = scene.run(PortableCpuAttention)
    tolerance = TOLERANCE[scene.dtype]
    torch.testing.assert_close(ours.double(), scene.expected(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours, scene.run(TorchNativeAttnBackend), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(3, 3), (9, 3), (8, 1)], ids=["ratio 1", "ratio 3", "ratio 8"])
@pytest.mark.parametrize("name", FORWARDS)
def test_extend(name: str, heads: tuple[int, int], dtype: torch.dtype) -> None:
    check(Scene(FORWARDS[name], dtype=dtype, heads=heads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(3, 3), (9, 3), (8, 1)], ids=["ratio 1", "ratio 3", "ratio 8"])
@pytest.mark.parametrize("name", DECODES)
def test_decode(name: str, heads: tuple[int, int], dtype: torch.dtype) -> None:
    check(Scene(DECODES[name], dtype=dtype, heads=heads, decode=True))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("decode", [False, True], ids=["extend", "decode"])
def test_contiguous_slots(page_size: int, decode: bool) -> None:
    sequences = DECODES["apart"] if decode else FORWARDS["mixed"]
    check(Scene(sequences, permuted=False, page_size=page_size, decode=decode))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_of_one_row_between_other_sequences(dtype: torch.dtype) -> None:
    runs = [Sequence(3, 40, 5), Sequence(3, 60, 8), Sequence(3, 100, 30)]
    check(Scene([Sequence(1, 20, 4), *runs, Sequence(2, 0, 9)], dtype=dtype))


def test_runs_of_one_row_from_its_start() -> None:
    check(Scene([Sequence(3, 0, 5), Sequence(3, 60, 8)]))


def test_runs_of_one_row_read_its_keys_once() -> None:
    scene = Scene([Sequence(3, 40, 5), Sequence(3, 60, 8), Sequence(3, 100, 30), Sequence(2, 50, 3)])
    rows = scene.batch.req_pool_indices.tolist()
    prefix_lens, extend_lens = scene.batch.extend_prefix_lens.tolist(), scene.batch.extend_seq_lens.tolist()
    spans = plan_extend(
        scene.rows.req_to_token, rows, prefix_lens=prefix_lens, extend_lens=extend_lens, dtype=torch.float32
    )
    assert [(span.queries, span.num_keys) for span in spans] == [(slice(0, 43), 130), (slice(43, 46), 53)]


def test_an_extend_longer_than_one_block_of_rows() -> None:
    scene = Scene([Sequence(3, 100, 1500)], heads=(2, 1))
    torch.testing.assert_close(scene.run(PortableCpuAttention), scene.run(TorchNativeAttnBackend), rtol=1e-5, atol=1e-5)


def test_chunks_add_up_to_one_prefill() -> None:
    whole = Scene([Sequence(1, 0, 90)])
    expected = whole.run(PortableCpuAttention)
    q, k, v = whole.q, whole.k, whole.v
    slots = whole.out_cache_loc
    parts = []
    for start, end in ((0, 32), (32, 64), (64, 90)):
        whole.batch.seq_lens = torch.tensor([end])
        whole.batch.extend_prefix_lens = torch.tensor([start])
        whole.batch.extend_seq_lens = torch.tensor([end - start])
        whole.batch.out_cache_loc = slots[start:end]
        whole.q, whole.k, whole.v = q[start:end], k[start:end], v[start:end]
        parts.append(whole.run(PortableCpuAttention))
    torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-5, atol=1e-5)


def test_stores_the_new_keys_and_values_and_nothing_else() -> None:
    scene = Scene(FORWARDS["mixed"])
    before = scene.keys.clone()
    scene.run(PortableCpuAttention)
    assert torch.equal(scene.keys[scene.out_cache_loc], scene.k)
    assert torch.equal(scene.values[scene.out_cache_loc], scene.v)
    before[scene.out_cache_loc] = scene.k
    torch.testing.assert_close(scene.keys, before, rtol=0, atol=0, equal_nan=True)


def test_reads_the_cache_where_no_keys_are_given() -> None:
    scene = Scene(FORWARDS["mixed"])
    expected = scene.run(PortableCpuAttention)
    scene.k = scene.v = None
    torch.testing.assert_close(scene.run(PortableCpuAttention), expected)


class CountScores(TorchFunctionMode):
    """Query-key pairs that the attention calls inside compute, per query head."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            query, key = args[:2]
            self.count += query.shape[:-1].numel() * key.shape[-2]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("extend", [1, 25, 40])
def test_an_extend_costs_its_own_tokens_times_the_sequence(extend: int) -> None:
    scene = Scene([Sequence(1, 1000, extend)])
    with CountScores() as scores:
        scene.run(PortableCpuAttention)
    assert scores.count == 9 * extend * (1000 + extend)
    with CountScores() as native:
        scene.run(TorchNativeAttnBackend)
    assert native.count == 9 * (1000 + extend) ** 2


def layer(**changes: Any) -> RadixAttention:
    return RadixAttention(9, HEAD_DIM, HEAD_DIM**-0.5, 3, 0, **changes)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"sliding_window_size": 128}, "sliding window"),
        ({"logit_cap": 30.0}, "logit cap"),
        ({"is_cross_attention": True}, "cross-attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "encoder_only"),
    ],
)
def test_refuses_other_attention_by_name(changes: dict[str, Any], name: str) -> None:
    scene = Scene(FORWARDS["prefill"])
    scene.layer = layer(**changes)
    with pytest.raises(UnsupportedAttention, match=name):
        scene.run(PortableCpuAttention)
    scene.runner.model = torch.nn.Sequential(scene.layer)
    with pytest.raises(UnsupportedAttention, match=name):
        PortableCpuAttention(scene.runner)


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"use_mla_backend": True}, "multi-head latent"), ({"device": "cuda"}, "device cuda")],
)
def test_refuses_other_models_by_name(changes: dict[str, Any], name: str) -> None:
    scene = Scene(FORWARDS["prefill"])
    vars(scene.runner).update(changes)
    with pytest.raises(UnsupportedAttention, match=name):
        PortableCpuAttention(scene.runner)


def test_refuses_speculative_decoding_by_name() -> None:
    scene = Scene(FORWARDS["prefill"])
    scene.batch.forward_mode = ForwardMode.TARGET_VERIFY
    with pytest.raises(UnsupportedAttention, match="TARGET_VERIFY"):
        scene.run(PortableCpuAttention)


@pytest.mark.parametrize("slot", [-1, NUM_SLOTS + 1])
def test_refuses_slots_outside_the_pool(slot: int) -> None:
    scene = Scene([Sequence(row=1, prefix=30, extend=4)])
    scene.batch.out_cache_loc[2] = slot
    with pytest.raises(IndexError, match="outside the KV pool"):
        scene.run(PortableCpuAttention)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_stores_what_sglang_stores(dtype: torch.dtype) -> None:
    ours, native = (Scene([Sequence(row=1, prefix=30, extend=15)], dtype=dtype) for _ in range(2))
    ours.run(PortableCpuAttention)
    native.run(TorchNativeAttnBackend)
    slots = ours.out_cache_loc
    assert torch.equal(ours.keys[slots], ours.k)
    assert torch.equal(ours.keys[slots], native.keys[slots])
    assert torch.equal(ours.values[slots], native.values[slots])
