"""Run, for every mutant, the tests that reach its site; list those that no test notices.

Runs in the instrumented copy of the tree. What is slow to import is imported once, before the forks.
"""

import argparse
import gc
import importlib
import importlib.metadata
import pkgutil
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tests.mutants import survivors
from tests.mutants.forks import CRASHED, Run, run_all
from tests.mutants.reach import FOLDERS, Traced, trace_tests
from tests.mutants.sites import PARTS, sites_of
from tests.mutants.switch import MUTANT

TESTS_S = 30.0
"""A mutant's tests are taken, the quickest first, until they have run this long unmutated."""
HANGS_S, LIMIT_S, SLOWER = 20.0, 120.0, 3
"""A mutant makes a test hang that takes this much longer than unmutated, or with what it sets up."""
NOT_RUN = {3, 4, 5, CRASHED}
"""Exit codes of pytest that say nothing about the tests: its own error, wrong usage, no test found."""


def import_all() -> None:
    """Import the product, with it torch, transformers and vLLM, and pytest's plugins."""
    for package in ("schemas", "connector", "service"):
        for module in pkgutil.walk_packages([package], f"{package}."):
            if not module.name.startswith("service.migrations."):  # Alembic runs these
                with suppress(ModuleNotFoundError):  # of a trainer, which the tests install elsewhere
                    importlib.import_module(module.name)
    for plugin in importlib.metadata.entry_points(group="pytest11"):
        plugin.load()
    importlib.import_module("tests.conftest")
    gc.freeze()  # collecting is then as quick in a fork as without all this


def chosen(tests: list[Traced]) -> list[Traced]:
    """Return the quickest tests, each function's first case before any one's second, up to the bound."""
    cases: Counter[str] = Counter()
    ranked = []
    for test in sorted(tests, key=lambda test: test.seconds):
        function = test.name.partition("[")[0]
        cases[function] += 1
        ranked.append((cases[function], test.seconds, test.name, test))
    kept, total_s = [], 0.0
    for _, seconds, _, test in sorted(ranked):
        if kept and total_s + seconds > TESTS_S:
            break
        kept.append(test)
        total_s += seconds
    return kept


def runs_of(mutants: dict[str, list[Traced]], work: Path) -> Iterator[Run]:
    """Yield the run of each mutant, with the tests that are to notice it."""
    for number, (site, tests) in enumerate(mutants.items()):
        few = chosen(tests)
        yield Run(
            name=site,
            arguments=[
                *("-x", f"--timeout={HANGS_S + SLOWER * max(test.seconds for test in few)}"),
                # A socket that a mutant left open would be an error of pytest's own, at its end.
                *("-W", "default::pytest.PytestUnraisableExceptionWarning"),
                *("-o", "timeout_func_only=true", *(test.name for test in few)),
            ],
            environment={MUTANT: site},
            output=work / f"mutant-{number}.txt",
            limit_s=LIMIT_S + SLOWER * sum(test.seconds for test in few),
        )


def main() -> int:
    """Hunt; return 1 where a survivor is not on the list. Raises ValueError where the list is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("root", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("parts", nargs="*", help=f"only these parts: {', '.join(PARTS)}")
    parser.add_argument(
        "--tests", nargs="+", default=FOLDERS, help="only the tests in these files and folders of tests/"
    )
    parser.add_argument("--sample", type=int, help="only so many mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    told = parser.parse_args()
    begun = time.monotonic()
    work = told.root / ".cache" / "mutants"
    listed = survivors.read((told.root / survivors.LIST).read_text(), set(sites_of(told.root, list(PARTS))))
    mutants = list(sites_of(told.root, told.parts or list(PARTS)))
    if told.sample is not None:
        mutants = random.Random(told.seed).sample(mutants, min(told.sample, len(mutants)))

    import_all()
    tests, failed = trace_tests(Path.cwd(), work, told.tests)
    traced_s = time.monotonic() - begun
    reaching: defaultdict[str, list[Traced]] = defaultdict(list)
    for test in tests:
        for site in test.sites:
            reaching[site].append(test)
    unreached = [site for site in mutants if site not in reaching]
    survived, hung = [], []
    for run, code, seconds in run_all(
        runs_of({site: reaching[site] for site in mutants if site in reaching}, work)
    ):
        if code in NOT_RUN:
            print(f"pytest did not run the tests of {run.name}: see {run.output}", flush=True)
            survived.append(run.name)
        elif code == 0:
            survived.append(run.name)
            print(f"  {seconds:6.1f} s  {len(run.arguments) - 6} tests let live {run.name}", flush=True)
        elif code is None:
            hung.append(run.name)

    alive = {*survived, *unreached}
    new = alive - listed.keys()
    for title, names in (
        ("left out, for it fails in the copy", failed),
        ("killed by a test that hung", hung),
        ("on the list, but killed", listed.keys() & set(mutants) - alive),
        ("new survivor", new - set(unreached)),
        ("new survivor that no fast test reaches", new & set(unreached)),
    ):
        for name in sorted(names):
            print(f"{title}: {name}")
    kinds = Counter(listed[site].partition(":")[0] for site in alive - new)
    print(f"mutants {len(mutants)}, killed {len(mutants) - len(alive)}, survived {len(alive)}:", end=" ")
    print(*(f"{kind} {number}" for kind, number in sorted(kinds.items())), f"new {len(new)}", sep=", ")
    print(f"{time.monotonic() - begun:.0f} s, {traced_s:.0f} of them to see what {len(tests)} tests reach")
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())
