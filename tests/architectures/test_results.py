"""The file of results: what was saved is loaded, one line a row."""

from concurrent.futures import ThreadPoolExecutor

from tests.architectures.results import Elsewhere, LayerNumbers, Matrix, Row, Verdict

NUMBERS = LayerNumbers(layer_id=8, min_cosine=1.0, median_rel_error=1e-6, max_rel_error=2e-6)


def a_row(key: str, verdict: Verdict = Verdict.PASS) -> Row:
    return Row(
        key=key,
        architecture=key,
        recipe="0" * 12,
        verdict=verdict,
        dtype="float32",
        layers=(NUMBERS,),
        versions={"torch": "1"},
    )


def test_what_was_saved_is_loaded(tmp_path):
    there = Elsewhere(engine="an engine", device="a device", runner="V1", outcome="not run")
    matrix = Matrix(
        listed_by="an engine", listed={"text": ("A",)}, elsewhere=(there,), rows=(a_row("A"), a_row("B"))
    )
    matrix.save(tmp_path / "results.json")
    assert Matrix.load(tmp_path / "results.json") == matrix


def test_a_row_takes_the_place_of_the_one_before_it(tmp_path):
    matrix = Matrix().with_row(a_row("B")).with_row(a_row("A")).with_row(a_row("B", Verdict.REFUSED))
    assert [(row.key, row.verdict) for row in matrix.rows] == [("A", Verdict.PASS), ("B", Verdict.REFUSED)]


def test_rows_that_are_kept_at_once_all_stay(tmp_path):
    path = tmp_path / "rows.json"
    Matrix().save(path)
    rows = [a_row(f"{number:02}") for number in range(24)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda row: Matrix.keep(row, path), rows))
    assert Matrix.load(path).rows == tuple(rows)
    assert [file.name for file in tmp_path.iterdir()] == ["rows.json"]
