"""The CPU twins of the ops."""

from collections.abc import Sequence
import enum
from typing import Annotated, overload

import numpy
import numpy.typing
from numpy.typing import NDArray


class ThreadPool:
    """The threads an op runs on. One op at a time may use a pool."""

    def __init__(self, num_threads: int) -> None:
        """`num_threads` counts the calling thread too."""

    @property
    def num_threads(self) -> int: ...

def token_logprobs(logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], table: numpy.typing.NDArray[numpy.void], slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], row_start: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], sample_start: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], tokens: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], num_emitted: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], logprob: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], rank: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu')], top_ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None, None), order='C', device='cpu')], top_logprobs: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], pool: ThreadPool | None = None) -> None:
    """
    How likely `logits` [num_logits, vocab_size] make each emitted token of the rows
    whose slot asks for it: `logprob` and `rank` [num_rows, max_emitted], and what is
    likeliest: `top_ids` and `top_logprobs` [num_rows, max_emitted, MAX_TOP_LOGPROBS].
    """

MAX_END_IDS: int = 8

MAX_LOGIT_BIASES: int = 256

MAX_TOP_LOGPROBS: int = 20

def slot_table_dtype() -> numpy.dtype[numpy.void]:
    """The NumPy dtype of one entry of the slot table, laid out as SlotState."""

def make_slot_table(num_slots: int) -> numpy.typing.NDArray[numpy.void]:
    """A zeroed slot table [num_slots], aligned as the ops need it."""

class Activation(enum.Enum):
    """What bias_activation applies."""

    NONE = 0

    GELU_TANH = 1

    GELU_ERF = 2

def bias_activation(x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], activation: Activation, pool: ThreadPool | None = None) -> None:
    """
    activation(`x` [num_rows, dim] + `bias` [dim]) into `out`, which may be x.
    """

def bias_residual(y: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], residual: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], pool: ThreadPool | None = None) -> None:
    """Adds `y` [num_rows, dim] + `bias` [dim] to `residual` in place."""

def causal_conv(x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], weight: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], ring: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], table: numpy.typing.NDArray[numpy.void], slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], row_start: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], pool: ThreadPool | None = None) -> None:
    """
    Convolves each row causally behind what its slot's ring holds, applies SiLU.

    Args:
      x: [num_tokens, x_stride]; a token's inputs are its first `channels` numbers.
      weight: [channels, kernel].
      ring: [num_slots, ring_cols, channels], raw inputs, read and written.
      out: [num_tokens, channels].
      table: [num_slots], of slot_table_dtype().
      slots: [num_rows]; -1 is a padded row.
      row_start: [num_rows + 1].
      pool: threads to run on; None is the calling thread.

    Raises:
      ValueError: a shape, a slot or a row start does not fit.
    """

def commit_round(table: numpy.typing.NDArray[numpy.void], slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], row_start: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], tokens: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], num_emitted: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], finish_reason: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], ring_rows: int, history_limit: int, prefill: bool, token_counts: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu')] | None = None, pool: ThreadPool | None = None) -> None:
    """
    Moves the cursors of every row's slot in `table` by what the step committed:
    `tokens` [num_rows, max_emitted], `num_emitted` and `finish_reason` [num_rows].
    `token_counts` uint16 [num_slots, vocab_size] follows for slots with penalties.
    """

def embedding(ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], table: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], pool: ThreadPool | None = None) -> None:
    """
    Rows of the embedding table, bfloat16 bits [vocab_size, hidden], into `out`
    [num_tokens, hidden]; zeros for an id outside the table.
    """

def gated_attention(q: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], gate: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], keys: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None, None), order='C', device='cpu', writable=False)], values: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None, None), order='C', device='cpu', writable=False)], page_table: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], table: numpy.typing.NDArray[numpy.void], slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], row_start: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], scale: float, pool: ThreadPool | None = None) -> None:
    """
    Causal attention of `q` [num_tokens, num_heads, head_dim] over pages [num_pages,
    num_kv_heads, page_size, head_dim], times sigmoid(gate). Row token i sees the kv
    indices 0 .. kv_len + i of its slot.
    """

def gated_delta_net_prefill(qkv: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], ba: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], a_log: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], dt_bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], state: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None, None), order='C', device='cpu')], ring_d: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None, None), order='C', device='cpu')], ring_k: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None, None), order='C', device='cpu')], ring_g: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], table: numpy.typing.NDArray[numpy.void], slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], row_start: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], history_limit: int = 0, pool: ThreadPool | None = None) -> None:
    """
    Runs the recurrence over each row in chunks of 64 tokens, into `out` and the state.

    Args:
      qkv: [num_tokens, qkv_stride]; a token begins with its queries, keys and values.
      ba: [num_tokens, ba_stride]; a token begins with b and a, [num_value_heads] each.
      a_log: [num_value_heads].
      dt_bias: [num_value_heads].
      state: [num_slots, num_value_heads, value_dim, key_dim].
      ring_d: [num_slots, num_value_heads, ring_rows, value_dim].
      ring_k: [num_slots, num_key_heads, ring_rows, key_dim].
      ring_g: [num_slots, num_value_heads, ring_rows].
      out: [num_tokens, num_value_heads, value_dim].
      table: [num_slots], of slot_table_dtype().
      slots: [num_rows]; -1 is a padded row.
      row_start: [num_rows + 1].
      history_limit: unused here.
      pool: threads to run on; None is the calling thread.

    Raises:
      ValueError: a shape, a slot or a row start does not fit.
    """

def gated_delta_net_verify(qkv: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], ba: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], a_log: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], dt_bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], state: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None, None), order='C', device='cpu')], ring_d: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None, None), order='C', device='cpu')], ring_k: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None, None), order='C', device='cpu')], ring_g: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], table: numpy.typing.NDArray[numpy.void], slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], row_start: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], history_limit: int = 0, pool: ThreadPool | None = None) -> None:
    """
    Runs each row as a window behind its slot's state and ring, appends the row's records.

    Args are those of gated_delta_net_prefill, with
      history_limit: records that a row may leave live; 0 folds the history at every row's start.

    Raises:
      ValueError: a shape, a slot or a row start does not fit.
    """

def gated_delta_net_materialize(state: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None, None), order='C', device='cpu')], ring_d: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None, None), order='C', device='cpu')], ring_k: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None, None), order='C', device='cpu')], ring_g: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], table: numpy.typing.NDArray[numpy.void], slot: int, num_records: int, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')]) -> None:
    """
    Writes the state of `slot` after its first `num_records` live records to `out`.

    Args are those of gated_delta_net_prefill, with
      out: [num_value_heads, value_dim, key_dim].

    Raises:
      ValueError: a shape, a slot or a row start does not fit.
    """

def flushes(ring_history: int, row_len: int, history_limit: int) -> bool:
    """
    Whether a row of row_len tokens folds its slot's history before it runs.
    """

def gated_rms_norm(x: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], z: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], weight: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], eps: float, pool: ThreadPool | None = None) -> None:
    """
    Writes x / sqrt(mean(x^2) + eps) * weight * silu(z) to out, per head.

    Args:
      x: [num_tokens, num_heads, head_dim].
      z: [num_tokens, z_stride]; a token's gates are its first num_heads * head_dim numbers.
      weight: [head_dim].
      out: as x; may be x.
      eps: added to the mean.
      pool: threads to run on; None is the calling thread.

    Raises:
      ValueError: a shape does not fit.
    """

@overload
def gather_rows(x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], index: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], pool: ThreadPool | None = None) -> None:
    """x[index] of `x` [num_tokens, dim] into `out` [num_out, dim]."""

@overload
def gather_rows(x: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu', writable=False)], index: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu')], pool: ThreadPool | None = None) -> None:
    """The same for bfloat16 bits."""

class InstructionSet(enum.IntEnum):
    """What the CPU ops use, from narrow to wide vectors."""

    BASE = 0

    AVX2 = 1

    AVX512 = 2

def widest_instruction_set() -> InstructionSet:
    """The widest that this machine and this build have."""

def instruction_set() -> InstructionSet:
    """The one that ops use: the widest, unless it was set."""

def set_instruction_set(instruction_set: InstructionSet) -> None:
    """
    Makes ops use another one, for tests and measurements; not while an op runs.

    Args:
      instruction_set: the one to use.

    Raises:
      ValueError: this machine or this build does not have it.
    """

def layer_norm(x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], weight: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], eps: float, pool: ThreadPool | None = None) -> None:
    """
    LayerNorm of `x` [num_rows, dim] times `weight` plus `bias` into `out`, which may be
    x.
    """

@overload
def linear(x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], weight: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], pool: ThreadPool | None = None) -> None:
    """
    Writes x @ weight.T to out, with bits that do not depend on the other rows.

    Args:
      x: [num_tokens, in_dim].
      weight: [out_dim, in_dim], the bits of bfloat16 numbers.
      out: [num_tokens, out_dim].
      pool: threads to run on; None is the calling thread.

    Raises:
      ValueError: a shape does not fit.
    """

@overload
def linear(x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], weight: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], pool: ThreadPool | None = None) -> None:
    """As above, for float32 weights."""

def patchify(pixels: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], levels: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], patch_size: int, merge_size: int, num_frames: int, first_row: int = 0, pool: ThreadPool | None = None) -> None:
    """
    Cuts a picture into normalised patches in merge-block order.

    Args:
      pixels: [height, width, 3], RGB.
      levels: [3, 256]: what a channel's value becomes.
      out: [num_rows, 3 * num_frames * patch_size * patch_size], channel first; each frame is the same.
      patch_size: side of a patch in pixels.
      merge_size: side of a merge block in patches.
      num_frames: how often a channel's patch is written.
      first_row: the patch of out's first row.
      pool: threads to run on; None is the calling thread.

    Raises:
      ValueError: a shape does not fit.
    """

def rms_norm(x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], weight: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], eps: float, unit_offset: bool, residual: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')] | None = None, pool: ThreadPool | None = None) -> None:
    """
    RMSNorm of `x` [num_tokens, dim] into `out`. With `residual`, x is first added to it
    in place and the sum is normalised. `unit_offset`: multiplies by 1 + weight.
    """

def rotary_kv_write(qkv: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], q_norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], k_norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], inv_freq: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], positions: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], section: Sequence[int], q_out: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], keys: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None, None), order='C', device='cpu')], values: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None, None), order='C', device='cpu')], page_table: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], table: numpy.typing.NDArray[numpy.void], slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], row_start: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], eps: float, attention_factor: float = 1.0, pool: ThreadPool | None = None) -> None:
    """
    Norms and rotates the queries of `qkv` into `q_out` [num_tokens, num_heads,
    head_dim], the keys, with the values, into pages [num_pages, num_kv_heads,
    page_size, head_dim]. Row token i goes to kv index kv_len + i of its slot.
    """

def round_metadata(table: numpy.typing.NDArray[numpy.void], row_slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], row_len: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')], row_start: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')], token_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')], positions: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu')], sample_start: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')], sample_len: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')], pool: ThreadPool | None = None) -> None:
    """
    What a round derives from the slot table: where the rows begin, the first token of each
    [num_tokens], rotary positions [3, num_tokens] and the logits rows to sample.
    """

def sample_accept(logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], table: numpy.typing.NDArray[numpy.void], slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], row_start: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], sample_start: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], sample_len: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], token_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], tokens: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu')], num_emitted: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')], num_accepted: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')], finish_reason: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')], forced: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None, token_counts: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None, bias_ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None, bias_values: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None, pool: ThreadPool | None = None) -> None:
    """
    Samples `logits` [num_logits, vocab_size] at every position of a row, accepts the
    drafts that agree and writes what the row emits into `tokens` [num_rows,
    max_emitted], `num_emitted`, `num_accepted` and `finish_reason` [num_rows].
    Rules of the slots: `token_counts` uint16 [num_slots, vocab_size], `bias_ids` and
    `bias_values` [num_slots, MAX_LOGIT_BIASES].
    """

def stream_uniform(seed: int, index: int, lane: int) -> float:
    """The uniform number in [0, 1) of stream `seed` at `index`."""

def philox4x32(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """One block of the generator Philox4x32-10."""

def scripted_draft(table: numpy.typing.NDArray[numpy.void], forced: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], script: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], row_start: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], token_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')], vocab_size: int, pool: ThreadPool | None = None) -> None:
    """
    Drafts the forced output of each row's slot, right for as many tokens as its script
    says for the round and wrong behind them, behind the first token of
    each row of `token_ids` [num_tokens].
    """

def silu_mul(gate_up: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], pool: ThreadPool | None = None) -> None:
    """
    silu(gate) * up of `gate_up` [num_tokens, 2 * dim] into `out` [num_tokens, dim].
    """

def vision_attention(q: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], keys: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None, None), order='C', device='cpu', writable=False)], values: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], num_patches: int, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], scale: float, pool: ThreadPool | None = None) -> None:
    """
    Attention of rows `q` [num_rows, num_heads * head_dim] over all patches of their
    picture, in both directions, into `out`, which may be q. `keys` and `values` are those
    that vision_rotary wrote.
    """

def vision_position_embedding(x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], table: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu', writable=False)], grid_height: int, grid_width: int, merge_size: int, bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, first_row: int = 0, pool: ThreadPool | None = None) -> None:
    """
    Adds bias and interpolated learned position to patch embeddings, in place.

    Args:
      x: [num_rows, dim], patches in merge-block order.
      table: [side * side, dim], the bits of bfloat16 numbers.
      grid_height: rows of patches in the picture.
      grid_width: columns of patches in the picture.
      merge_size: side of a merge block in patches.
      bias: [dim].
      first_row: the patch of x's first row.
      pool: threads to run on; None is the calling thread.

    Raises:
      ValueError: a shape does not fit.
    """

def vision_rotary_angles(head_dim: int, theta: float, angles: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')]) -> None:
    """
    Fills `angles` [num_positions, 2, head_dim / 4] with cosines, then sines.
    """

def vision_rotary(qkv: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], angles: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], q: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], keys: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None, None), order='C', device='cpu')], values: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], grid_height: int, grid_width: int, merge_size: int, first_row: int = 0, pool: ThreadPool | None = None) -> None:
    """
    Adds the bias, rotates q and k by the patch's place, lays k and v out for attention.

    Args:
      qkv: [num_rows, 3 * num_heads * head_dim], patches in merge-block order.
      bias: [3 * num_heads * head_dim].
      angles: [num_positions, 2, head_dim / 4] of vision_rotary_angles.
      q: [num_rows, num_heads * head_dim], written.
      keys: [num_heads, num_tiles, head_dim, 64], written at the rows' patches.
      values: [num_heads, num_tiles * 64, head_dim rounded up to 16], written likewise.
      grid_height: rows of patches in the picture.
      grid_width: columns of patches in the picture.
      merge_size: side of a merge block in patches.
      first_row: the patch of the first row of qkv and q.
      pool: threads to run on; None is the calling thread.

    Raises:
      ValueError: a shape does not fit.
    """
