"""One attempt at one unit: from its plan, through the engine, to proven files and the commit that names them.

Runs on the worker's event loop; disk access and checks run in threads. Failures raise errors of
`service.errors`; the next attempt, or the sweeper, removes the attempt's files.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from connector.wire import RowRef
from schemas.dataset.columns import PLAN_SCHEMA
from schemas.dataset.entries import ShardEntry
from schemas.dataset.index import Witness, write_index
from schemas.dataset.token_counts import packed_counts
from schemas.job import RejectView
from schemas.names import index_path, shard_path
from schemas.receipts import NOT_FINITE, AttemptId, OpenUnit, UnitSealed
from service.capture.answering import Answering, row_name
from service.capture.attempt_files import INDEX_FILE, attempt_folder, open_attempt, remove_earlier
from service.capture.engine import Prompt, PromptRefused
from service.capture.interruption import together
from service.capture.not_finite import settle
from service.capture.receipt_errors import in_time, raise_failure, silent
from service.capture.renderer import Renderers
from service.capture.second_run import run_again
from service.capture.session import EngineSession
from service.errors import writing
from service.plan.unit_plan import as_written, unpacked
from service.proof.checks import check_unit
from service.store import Store, UnitCommit, UnitLease
from service.work import meters


class UnitRun:
    """Runs one leased unit on a started engine. `run` is called once."""

    def __init__(
        self,
        lease: UnitLease,
        session: EngineSession,
        on_answered: Callable[[], None],
        renderers: Renderers,
        store: Store,
    ) -> None:
        """Store the arguments; `on_answered` is called when the engine has answered every row.

        The `store` knows which rows other engines have found not finite.
        """
        self._on_answered = on_answered
        self._lease, self._session = lease, session
        self._budget, self._settings = session.budget, session.settings
        self._attempt_id = lease.attempt_id
        self._renderers, self._store = renderers, store
        self._answering: Answering | None = None
        """Set if the target still has to answer."""
        self._witnesses: dict[int, Witness] = {}
        self._skipped: set[int] = set()
        self._shared: set[int] = set()
        """Rows that shared the engine with another request."""
        self._rejects: list[RejectView] = []
        self._plan = PLAN_SCHEMA.empty_table()

    async def run(self) -> UnitCommit:
        """Capture and verify the unit; return the commit.

        On cancellation the connector forgets the attempt.
        """
        await asyncio.to_thread(remove_earlier, self._settings, self._attempt_id)
        self._plan = await asyncio.to_thread(unpacked, self._lease.plan, self._lease.plan_sha256)
        if self._lease.answers_anew:
            renderer = None
            if self._lease.identity.is_rendered_again:
                renderer = await self._renderers.of(self._lease)
            self._answering = Answering(
                self._lease, self._plan, self._session.engine, renderer, self._budget.heard
            )
        link = self._session.link
        order = self._session.opening(self._attempt_id, self._plan.num_rows, self._lease.identity)
        try:
            await open_attempt(link, self._settings, order, self._lease.plan)
            sealed = await self._capture()
        except BaseException:
            await link.abandon(self._attempt_id)
            raise
        for receipt in sealed:
            meters.SEALED.add(samples=len(receipt.rows), tokens=sum(receipt.num_tokens), bytes=receipt.bytes)
        commit = await asyncio.to_thread(self._verify, order, sealed)
        written = {} if self._answering is None else self._answering.written
        await settle(self._lease, self._session, self._store, self._plan, sealed, written)
        answers = {} if self._answering is None else self._answering.last_answers
        cosine = await run_again(self._lease, self._session, sealed, answers, self._shared)
        if cosine is not None:
            checks = commit.checks.model_copy(update={"second_runs": 1, "second_run_cosine": cosine})
            commit = replace(commit, checks=checks)
        meters.PROVEN.add_shards(commit.shards)
        return commit

    async def _capture(self) -> tuple[UnitSealed, ...]:
        """Run every row and wait for the receipts; stop early on a failed receipt or a silent engine."""
        receipts = asyncio.create_task(self._session.link.receipts(self._attempt_id))
        rows = asyncio.create_task(self._run_rows())
        silence = asyncio.create_task(self._budget.silence(self._settings.engine_silence_s))
        try:
            await asyncio.wait({receipts, rows, silence}, return_when=asyncio.FIRST_COMPLETED)
            if not rows.done() and receipts.done():
                raise_failure(receipts.result())
                await asyncio.wait({rows, silence}, return_when=asyncio.FIRST_COMPLETED)
            if not rows.done():
                raise silent(self._settings.engine_silence_s)
            rows.result()
            return raise_failure(await in_time(receipts, self._settings.receipt_timeout_s))
        finally:
            for task in (receipts, rows, silence):
                task.cancel()
            await asyncio.gather(receipts, rows, silence, return_exceptions=True)

    async def _run_rows(self) -> None:
        await together(self._run_rows_of(rows) for rows in self._conversations())
        self._on_answered()

    def _conversations(self) -> list[list[int]]:
        """Return the plan's rows, grouped by conversation."""
        groups: list[list[int]] = []
        in_turns = self._answering is not None and "turn" in self._plan.column_names
        turns = self._plan["turn"].to_pylist() if in_turns else [0] * self._plan.num_rows
        for row, turn in enumerate(turns):
            if turn > 1:
                groups[-1].append(row)
            else:
                groups.append([row])
        return groups

    async def _run_rows_of(self, rows: Sequence[int]) -> None:
        answering = self._answering
        if answering is None:
            await self._prefill(rows[0])
            return
        planned = answering.planned(rows)
        async with self._budget.hold(max(row.most_tokens for row in planned)) as held:
            await answering.run(planned)
            for row in answering.rejects.keys() & set(rows):
                await self._skip(row, *answering.rejects[row])
        if held.is_shared:
            self._shared.update(rows)
        written = [answering.written[row] for row in rows if row in answering.written]
        meters.PREFILLED.add(samples=len(written), tokens=sum(len(row.ids) for row in written))

    async def _prefill(self, row: int) -> None:
        """Capture a row whose tokens are all known."""
        token_ids = tuple(self._plan["input_ids"][row].values.to_numpy().tolist())
        name, ref = row_name(self._attempt_id, row), RowRef(self._attempt_id, row, len(token_ids))
        async with self._budget.hold(len(token_ids)) as held:
            try:
                answer = await self._session.engine.run(Prompt(name, token_ids, ref, witness=True))
            except PromptRefused as error:
                await self._skip(row, "engine-refused", str(error))
                return
        if held.is_shared:
            self._shared.add(row)
        meters.PREFILLED.add(samples=1, tokens=len(token_ids))
        if answer.likely:
            self._witnesses[row] = answer.likely

    async def _skip(self, row: int, reason: str, detail: str) -> None:
        self._skipped.add(row)
        await self._session.link.skip(self._attempt_id, row)
        self._reject(row, reason, detail)

    def _reject(self, row: int, reason: str, detail: str) -> None:
        columns = {"position", "sample_id", "source_id", "turn"}.intersection(self._plan.column_names)
        named = self._plan.select(sorted(columns))
        (planned,) = named.slice(row, 1).to_pylist()
        self._rejects.append(RejectView(reason=reason, detail=detail, **planned))

    def _verify(self, order: OpenUnit, sealed: Sequence[UnitSealed]) -> UnitCommit:
        """Check the sealed files against plan and model, write their index, and return the commit."""
        folder, answering = attempt_folder(self._settings, self._attempt_id), self._answering
        if answering is not None:
            self._witnesses = answering.witnesses
        proof = check_unit(
            attempt=folder,
            plan=self._plan,
            receipts=sealed,
            skipped=self._skipped,
            witnesses=self._witnesses,
            head=self._session.head,
            identity=self._lease.identity,
            written={} if answering is None else answering.written,
        )
        for receipt in sealed:
            for reject in receipt.rejected:
                self._reject(reject.row, reject.reason, reject.detail)
        shards = shard_entries(self._attempt_id, sealed, proof.sha256s)
        # The rows are those read by the proof: the files are not read again.
        rows = {entry.path: proof.rows[rank] for entry, rank in zip(shards, proof.rows, strict=True)}
        index, counts, plan = None, Counter[int](), b""
        if rows:
            path = index_path(self._attempt_id.job_id, self._attempt_id.unit)
            with writing(f"the index {path}"):
                index, counts = write_index(folder / INDEX_FILE, path, rows, self._plan, self._witnesses)
            if self._rejects or self._lease.identity.generate is not None:
                plan = as_written(self._plan, chain.from_iterable(rows.values()))
        return UnitCommit(
            attempt_id=self._attempt_id,
            provenance=order.provenance,
            shards=shards,
            index=index,
            rejects=tuple(sorted(self._rejects, key=lambda reject: (reject.position, reject.turn))),
            num_tokens=sum(entry.tokens for entry in shards),
            supervised_tokens=counts.total(),
            checks=proof.checks.model_copy(
                update={"answers": {} if answering is None else +answering.counts}
            ),
            final_norm=self._session.head.final_norm_file,
            content_hashes=self._content_hashes(sealed),
            token_counts=packed_counts(counts),
            plan=plan,
        )

    def _content_hashes(self, sealed: Sequence[UnitSealed]) -> bytes:
        """Return those of the samples that the next run of a schedule leaves out.

        One that the engine or the checks of its states rejected is among them; one that is not finite comes
        again, since that may have been the device's fault.
        """
        if "content_hash" not in self._plan.column_names:
            return b""
        again = {reject.row for one in sealed for reject in one.rejected if reject.reason == NOT_FINITE}
        hashes = self._plan["content_hash"].to_pylist()
        return b"".join(made for row, made in enumerate(hashes) if row not in again)


def shard_entries(
    attempt_id: AttemptId, sealed: Sequence[UnitSealed], sha256s: Mapping[int, str]
) -> tuple[ShardEntry, ...]:
    """Return the entries of the files that were written, in rank order."""
    return tuple(
        ShardEntry(
            path=shard_path(attempt_id.job_id, attempt_id.unit, receipt.rank, len(sealed)),
            sha256=sha256s[receipt.rank],
            xxh3=receipt.xxh3,
            bytes=receipt.bytes,
            rows=len(receipt.rows),
            tokens=sum(receipt.num_tokens),
            unit=attempt_id.unit,
            epoch=attempt_id.epoch,
            layers=receipt.layers,
        )
        for receipt in sealed
        if receipt.file is not None
    )
