from tests.drill.page import ABOUT, PAGE, page
from tests.drill.table import Check


def test_the_page_is_what_the_drill_asserts():
    assert PAGE.read_text() == page(), "run: python -m tests.drill.page"


def test_the_page_tells_of_every_check():
    assert set(Check) <= ABOUT.keys()
