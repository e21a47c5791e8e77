from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from schemas.dataset import files
from schemas.dataset.direct import BLOCK_BYTES
from schemas.dataset.manifest import UnitChecks
from schemas.receipts import RejectedRow, UnitSealed
from service.errors import EngineDied, StatesWrong, WriteFailed
from service.proof.checks import Written, check_unit
from service.proof.head import Head
from tests.support.plans import sample_id
from tests.support.reference_models import MODEL_TYPES, NUM_LAYERS, TinyModel
from tests.support.shards import (
    LENGTHS,
    Capture,
    ShardRow,
    capture,
    plan_of,
    seal_attempt,
    stored_bytes,
    with_states,
)

CASES = [("llama", "float32"), ("llama", "bfloat16"), ("qwen3", "bfloat16"), ("gemma2", "bfloat16")]
CASES += [("gpt_neox", "bfloat16"), ("gpt_neox", "float32"), ("gemma2", "float16")]
LAST = len(LENGTHS) - 1


@dataclass(frozen=True, slots=True)
class Unit:
    folder: Path
    captured: Capture
    head: Head

    def seal(self, rows: list[ShardRow] | None = None) -> UnitSealed:
        rows = self.captured.rows if rows is None else rows
        return seal_attempt(self.folder, self.captured.provenance, dict(enumerate(rows)))

    def check(self, *receipts: UnitSealed, **changes: object) -> UnitChecks:
        values = {
            "attempt": self.folder,
            "plan": plan_of(self.captured.rows),
            "receipts": receipts,
            "witnesses": self.captured.witnesses,
            "head": self.head,
            "identity": self.captured.about,
        }
        return check_unit(**(values | changes)).checks


def make_unit(tmp_path: Path, model_type: str, dtype: str, **changes: object) -> Unit:
    model = TinyModel(tmp_path / "model", model_type, dtype)
    captured = capture(model, dtype=dtype, **changes)
    return Unit(tmp_path / "attempt", captured, Head.load(model.folder, dtype))


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def any_model(request, tmp_path_factory):
    """One unit for each model and dtype; tests seal other files into folders of their own."""
    return make_unit(tmp_path_factory.mktemp("unit"), *request.param)


@pytest.fixture
def unit(any_model, tmp_path):
    return replace(any_model, folder=tmp_path)


@pytest.fixture(scope="module")
def shared_llama(tmp_path_factory):
    return make_unit(tmp_path_factory.mktemp("llama"), "llama", "bfloat16")


@pytest.fixture
def llama(shared_llama, tmp_path):
    return replace(shared_llama, folder=tmp_path)


def test_right_states_pass_and_are_counted(unit):
    checks = unit.check(unit.seal())
    assert checks.rows_checked == checks.logit_rows == checks.logit_argmax_agree == len(LENGTHS)
    assert checks.logit_max_error < 0.05


def test_many_right_rows_raise_no_false_alarm(unit):
    model, dtype = unit.captured.model, unit.captured.about.dtype
    unit = replace(unit, captured=capture(model, dtype=dtype, lengths=[3 + n % 5 for n in range(150)]))
    checks = unit.check(unit.seal())
    assert checks.logit_rows == 150
    assert checks.logit_argmax_agree > 135


def post_norm(unit: Unit, row: ShardRow) -> torch.Tensor:
    return unit.captured.model.run(row.input_ids).post_norm


def layer_before(unit: Unit, row: ShardRow) -> torch.Tensor:
    return unit.captured.model.run(row.input_ids).layers[NUM_LAYERS - 1]


def of_another_row(unit: Unit, row: ShardRow) -> torch.Tensor:
    other = unit.captured.rows[LAST - 1 if row == unit.captured.rows[LAST] else LAST]
    return other.states[NUM_LAYERS].repeat(40, 1)[: len(row.input_ids)]


def stale_block_at_the_end(unit: Unit, row: ShardRow) -> torch.Tensor:
    states = row.states[NUM_LAYERS].clone()
    states[-16:] = unit.captured.rows[LAST - 1].states[NUM_LAYERS][: min(16, len(states))]
    return states


def shifted_by_one_token(unit: Unit, row: ShardRow) -> torch.Tensor:
    return row.states[NUM_LAYERS].roll(1, dims=0)


@pytest.mark.parametrize("plant", [post_norm, layer_before])
def test_a_last_layer_that_is_wrong_in_every_row_is_named(
    unit, plant: Callable[[Unit, ShardRow], torch.Tensor]
):
    model, dtype = unit.captured.model, unit.captured.about.dtype
    unit = replace(unit, captured=capture(model, dtype=dtype, lengths=LENGTHS * 3))
    rows = [with_states(row, NUM_LAYERS, plant(unit, row)) for row in unit.captured.rows]
    with pytest.raises(StatesWrong, match=r"unit 0, row \d+ \(\w+\): .*(states say token|rounding explains)"):
        unit.check(unit.seal(rows))


@pytest.mark.parametrize("plant", [of_another_row, stale_block_at_the_end, shifted_by_one_token])
def test_a_wrong_last_layer_is_named_with_both_values(unit, plant: Callable[[Unit, ShardRow], torch.Tensor]):
    row = unit.captured.rows[LAST]
    rows = [*unit.captured.rows[:LAST], with_states(row, NUM_LAYERS, plant(unit, row))]
    message = rf"unit 0, row {LAST} \({row.sample_id}\): .*(stored states say token|rounding explains)"
    with pytest.raises(StatesWrong, match=message):
        unit.check(unit.seal(rows))


def test_states_of_two_rows_that_changed_places_are_found(llama):
    """Both rows have 17 tokens, and everything but the states stays."""
    unit = replace(llama, captured=capture(llama.captured.model, dtype="bfloat16", lengths=(17, 17)))
    first, second = unit.captured.rows
    rows = [replace(first, states=second.states), replace(second, states=first.states)]
    with pytest.raises(StatesWrong, match=r"row 0 .*; unit 0, row 1 "):
        unit.check(unit.seal(rows))


def equal_layers(row: ShardRow) -> ShardRow:
    return with_states(row, 2, row.states[1])


def changed(**columns: object) -> Callable[[ShardRow], ShardRow]:
    return lambda row: replace(row, **columns)


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (equal_layers, "layers 1 and 2 hold the same states"),
        (changed(checksums=[1, 2, 3]), r"layer 1: its bytes have xxh3 \w{16}, 0000000000000001 is"),
        (changed(sample_id="another"), r"sample_id is 'another', expected '\w+'"),
        (changed(source_id="another"), r"source_id is 'another', expected None"),
        (changed(prompt_tokens=3), "prompt_tokens is 3, expected 16"),
        (changed(input_ids=[7] * 16), r"input_ids differs at 0: expected \d+, got 7"),
        (changed(loss_mask=[1] * 16), "loss_mask differs at 0: expected 0, got 1"),
    ],
)
def test_a_row_that_departs_from_its_plan_or_its_bytes_is_named(llama, plant, message):
    right = llama.captured.rows
    receipt = llama.seal([*right[:2], plant(right[2]), *right[3:]])
    with pytest.raises(StatesWrong, match=rf"unit 0, row 2 \(.*\): {message}"):
        llama.check(receipt)


def test_a_truncated_row_departs_from_the_plan(llama):
    planned = replace(llama.captured.rows[LAST], prompt_tokens=32)
    plan = plan_of([*llama.captured.rows[:LAST], planned])
    states = {k: states[:-1] for k, states in planned.states.items()}
    short = replace(
        planned, input_ids=planned.input_ids[:-1], loss_mask=planned.loss_mask[:-1], states=states
    )
    receipt = llama.seal([*llama.captured.rows[:LAST], short])
    with pytest.raises(StatesWrong, match=r"expected 33 tokens, got 32"):
        llama.check(receipt, plan=plan)


@pytest.mark.parametrize("compression", ["none", "fp8"])
def test_a_bit_flipped_in_the_sealed_file_is_found(tmp_path, compression):
    """In fp8 it is one of a scale, which stands behind the codes."""
    unit = make_unit(tmp_path, "llama", "bfloat16", compression=compression)
    receipt = unit.seal()
    path = unit.folder / receipt.file
    data, states_TH = bytearray(path.read_bytes()), unit.captured.rows[LAST].states[2]
    wanted = stored_bytes(states_TH, unit.captured.about)
    at = data.find(wanted[states_TH.numel() :])
    assert at > 0
    data[at + 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(WriteFailed, match=r"has xxh3 \w{32}, its receipt says"):
        unit.check(receipt)


@pytest.mark.parametrize(
    "damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-9])]
)
def test_a_sealed_file_that_is_gone_or_cut_short_is_tried_again(llama, damage):
    receipt = llama.seal()
    damage(llama.folder / receipt.file)
    with pytest.raises(WriteFailed, match="cannot be read back"):
        llama.check(receipt)


def test_a_receipt_of_another_length_is_tried_again(llama):
    receipt = llama.seal()
    with pytest.raises(WriteFailed, match=r"has \d+ bytes, its receipt says"):
        llama.check(receipt.model_copy(update={"bytes": receipt.bytes + 1}))


def test_a_footers_length_is_not_believed_with_memory(llama, monkeypatch):
    receipt = llama.seal()
    file = llama.folder / receipt.file
    content = bytearray(file.read_bytes())
    content[-5] ^= 0x7F  # the highest byte of the footer's length
    file.write_bytes(content)
    asked, memory = [], files.page_aligned
    monkeypatch.setattr(files, "PIECE_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(files, "page_aligned", lambda num_bytes: asked.append(num_bytes) or memory(num_bytes))
    with pytest.raises(WriteFailed, match=r"the footer of .* has xxh3"):
        llama.check(receipt)
    assert max(asked) == 2 * BLOCK_BYTES < len(content)


def test_a_row_with_fewer_states_than_tokens_is_tried_again(llama):
    row = llama.captured.rows[LAST]
    short = replace(row, states={k: states[:-2] for k, states in row.states.items()})
    with pytest.raises(WriteFailed, match=r"layer_1 takes"):
        llama.check(llama.seal([*llama.captured.rows[:LAST], short]))


def test_receipt_and_file_must_agree_on_lengths_and_rows(llama):
    receipt = llama.seal()
    with pytest.raises(StatesWrong, match=r"row 0 .*num_tokens is 1, expected 2"):
        llama.check(receipt.model_copy(update={"num_tokens": (2, *LENGTHS[1:])}))
    fewer = llama.seal(llama.captured.rows[:-1]).model_copy(
        update={"rows": receipt.rows, "num_tokens": receipt.num_tokens}
    )
    with pytest.raises(StatesWrong, match="has 4 rows, its receipt 5"):
        llama.check(fewer)
    with pytest.raises(StatesWrong, match="5 rows and 4 lengths"):
        llama.check(receipt.model_copy(update={"num_tokens": LENGTHS[1:]}))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_states_stored_as_fp8_agree_with_their_model_and_another_rows_do_not(tmp_path, model_type, dtype):
    unit = make_unit(tmp_path, model_type, dtype, compression="fp8")
    assert unit.check(unit.seal()).logit_rows == len(LENGTHS)
    rows = list(unit.captured.rows)
    rows[2] = with_states(rows[2], NUM_LAYERS, rows[4].states[NUM_LAYERS][-len(rows[2].input_ids) :])
    with pytest.raises(StatesWrong, match="by the stored states"):
        replace(unit, folder=tmp_path / "wrong").check(replace(unit, folder=tmp_path / "wrong").seal(rows))


def test_a_shard_of_another_job_is_refused(llama):
    other = llama.captured.about.model_copy(update={"revision": "f" * 40})
    with pytest.raises(StatesWrong, match="carries another identity"):
        llama.check(llama.seal(), identity=other)


def test_rows_that_the_engine_dropped_send_the_unit_back(llama):
    receipt = llama.seal(llama.captured.rows[:3]).model_copy(update={"void": (3, 4)})
    with pytest.raises(EngineDied, match="the engine dropped rows 3, 4"):
        llama.check(receipt)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((0, 1, 2, 3), "row 4 has 0"),
        ((0, 1, 2, 3, 3), "row 3 has 2, row 4 has 0"),
        ((0, 1, 2, 3, 9), "row 9 has 1"),
    ],
)
def test_every_planned_row_needs_one_end(llama, rows, message):
    receipt = llama.seal()
    with pytest.raises(StatesWrong, match=rf"each of 5 planned rows must have one outcome; .*{message}"):
        llama.check(receipt.model_copy(update={"rows": rows, "num_tokens": LENGTHS[: len(rows)]}))


def test_rejected_and_skipped_rows_are_ends_too(llama):
    receipt = seal_attempt(llama.folder, llama.captured.provenance, {2: llama.captured.rows[2]})
    rejected = (
        RejectedRow(row=0, reason="not-finite", detail=""),
        RejectedRow(row=4, reason="not-finite", detail=""),
    )
    checks = llama.check(receipt.model_copy(update={"rejected": rejected}), skipped={1, 3})
    assert (checks.rows_checked, checks.logit_rows) == (1, 1)
    with pytest.raises(StatesWrong, match="row 2 has 2"):
        llama.check(receipt.model_copy(update={"rejected": rejected}), skipped={1, 2, 3})


def test_a_unit_whose_every_row_was_rejected_has_no_file(llama):
    rejected = tuple(RejectedRow(row=row, reason="not-finite", detail="") for row in range(len(LENGTHS)))
    receipt = llama.seal().model_copy(
        update={"file": None, "rows": (), "num_tokens": (), "rejected": rejected, "bytes": 0}
    )
    assert llama.check(receipt).rows_checked == 0


def test_rows_spread_over_ranks_in_any_order_are_one_unit(llama):
    rows = llama.captured.rows
    told = llama.captured.provenance
    even = seal_attempt(llama.folder, told, {4: rows[4], 0: rows[0], 2: rows[2]}, rank=0, num_ranks=2)
    odd = seal_attempt(llama.folder, told, {3: rows[3], 1: rows[1]}, rank=1, num_ranks=2)
    assert llama.check(even, odd).logit_argmax_agree == 5
    with pytest.raises(StatesWrong, match=r"row 0 .*sample_id"):
        llama.check(even.model_copy(update={"rows": (0, 4, 2)}), odd)


def test_without_the_last_layer_no_logits_are_checked(tmp_path):
    unit = make_unit(tmp_path, "llama", "bfloat16", layer_ids=(1, 2))
    checks = unit.check(unit.seal())
    assert (checks.rows_checked, checks.logit_rows) == (5, 0)


def test_a_captured_last_layer_is_never_left_unproven(llama):
    witnesses = {row: witness for row, witness in llama.captured.witnesses.items() if row != 3}
    with pytest.raises(StatesWrong, match=r"row 3 .*gave no log-probability"):
        llama.check(llama.seal(), witnesses=witnesses)


def generated(row: ShardRow, prompt_tokens: int, mask: list[int] | None = None) -> tuple[ShardRow, ShardRow]:
    """Return a stored row whose tail is an answer, and its planned prompt."""
    answer = [1] * (len(row.input_ids) - prompt_tokens)
    ids, silent = row.input_ids[:prompt_tokens], [0] * prompt_tokens
    row = replace(row, sample_id=sample_id(row.source_id, ids, silent))
    prompt = replace(row, prompt_tokens=prompt_tokens, input_ids=ids, loss_mask=silent)
    stored = replace(row, prompt_tokens=prompt_tokens, loss_mask=prompt.loss_mask + (mask or answer))
    return stored, prompt


GENERATE = {"max_tokens": 64}


def test_a_row_that_was_answered_is_what_was_asked_and_what_was_said(tmp_path):
    """Each token and its mask; the last one alone may be missing, which has no state in one pass."""
    unit = make_unit(tmp_path, "llama", "bfloat16", generate=GENERATE, capture="one_pass", lengths=(17,))
    stored, prompt = generated(unit.captured.rows[0], 10)
    plan = plan_of([prompt])
    ids, mask = [*stored.input_ids, 3], [*stored.loss_mask, 1]
    written = {0: Written(np.array(ids, np.int32), np.array(mask, np.uint8), 10)}
    assert unit.check(unit.seal([stored]), plan=plan, written=written).logit_rows == 1
    holes, _ = generated(unit.captured.rows[0], 10, mask=[1, 1, 0, 1, 1, 1, 1])
    with pytest.raises(StatesWrong, match="loss_mask differs at 12: expected 1, got 0"):
        unit.check(unit.seal([holes]), plan=plan, written=written)
    for place in (9, 14):
        other = list(stored.input_ids)
        other[place] += 1
        with pytest.raises(StatesWrong, match=f"input_ids differs at {place}"):
            unit.check(unit.seal([replace(stored, input_ids=other)]), plan=plan, written=written)
    longer = {0: Written(np.array([*ids, 4], np.int32), np.array([*mask, 1], np.uint8), 10)}
    with pytest.raises(StatesWrong, match="expected 19 tokens, got 17"):
        unit.check(unit.seal([stored]), plan=plan, written=longer)
    with pytest.raises(StatesWrong, match="expected 10 tokens, got 17"):
        unit.check(unit.seal([stored]), plan=plan)
