# SPDX-License-Identifier: MIT OR Apache-2.0
"""The page of ``metrale audit report --html``, in a real browser: headless Chromium."""

import re
import shutil
import time

import pytest
from captures import capture, entry, many

from metrale.cli import main

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--window-size=1400,1300"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
MANY = 100_000
OPENS_WITHIN = 2.0  # seconds
GIVES_UP_AFTER = 30.0  # seconds
ANSWERS_WITHIN = 0.3  # seconds: at once, on a busy machine
ENDLESS = "\u2013"  # for the life of what leaked
MARKUP = "</script><img src=x onerror=alert(1)>"
SMALL = [
    entry(1, 4 * 2**20, tag="weights", line=10, freed_seq=950_000, leaked=True),  # close() gave it back
    entry(2, 2**20, tag="act", file="/home/me/model/layer.py", line=20, freed_seq=50_000),
    entry(60_000, 2**20, tag=MARKUP, line=30, freed_seq=90_000),
    entry(70_000, 0, kind="stream", line=40),
    entry(80_000, 2**19, kind="pinned", tag="staging", line=50, freed_seq=99_999),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="there is no selenium to drive a browser")
    if not (BROWSER and DRIVER):
        pytest.skip("there is no Chromium: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


class Page:
    """What a user sees and does."""

    def __init__(self, driver, path):
        self.driver = driver
        driver.get_log("browser"), driver.get_log("performance")
        began = time.perf_counter()
        driver.get(path.as_uri())
        # A driver's get() may return before the page has run: what counts is that it is there and drawn.
        filled = "document.getElementById('tiles')?.children.length > 0 && document.readyState === 'complete'"
        while not driver.execute_script(f"return location.href === arguments[0] && {filled}", path.as_uri()):
            assert time.perf_counter() - began < GIVES_UP_AFTER, driver.get_log("browser")
        self.settle()
        self.seconds = time.perf_counter() - began

    def js(self, code, *values):
        return self.driver.execute_script(code, *values)

    def rows(self):
        """The cells of the rows on the screen."""
        return self.js(
            "return [...document.querySelectorAll('.row')].map(r => [...r.children].map(c => c.textContent))"
        )

    def words(self, place):
        return self.js("return document.getElementById(arguments[0]).textContent", place)

    def search(self, words):
        """Types at once; returns the seconds until the rows are there."""
        return self.js(
            "const began = performance.now(), field = document.getElementById('search'); field.value = arguments[0];"
            "field.dispatchEvent(new Event('input')); document.getElementById('rows').offsetHeight;"
            "return (performance.now() - began) / 1e3",
            words,
        )

    def press(self, words):
        """A button, by its words; those of a heading may be followed by an arrow."""
        self.js(
            "[...document.querySelectorAll('button')].find(b => b.textContent.replace(/ [↑↓]/, '') === arguments[0])"
            ".click()",
            words,
        )

    def canvas(self, place="blocks"):
        from selenium.webdriver.common.by import By

        return self.driver.find_element(By.ID, place)

    def mouse(self):
        from selenium.webdriver import ActionChains

        return ActionChains(self.driver, duration=50)

    def hover(self, across, up):
        """The tooltip where a share of the plot's width and height is; None if there is none."""
        box = self.canvas().size
        x = 62 + across * (box["width"] - 62) - box["width"] / 2
        y = 4 + (1 - up) * (box["height"] - 24) - box["height"] / 2
        self.mouse().move_to_element_with_offset(self.canvas(), round(x), round(y)).perform()
        return self.js("const t = document.getElementById('tip'); return t.hidden ? null : t.innerText")

    def wheel(self, amount, shift=False):
        """Turn the wheel over the middle of the blocks."""
        from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
        from selenium.webdriver.common.keys import Keys

        origin, mouse = ScrollOrigin.from_element(self.canvas(), 31, 0), self.mouse()
        if shift:
            mouse.key_down(Keys.SHIFT)
        mouse.scroll_from_origin(origin, 0, amount)
        if shift:
            mouse.key_up(Keys.SHIFT)
        mouse.perform()
        self.settle()

    def settle(self):
        self.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")

    def seconds_shown(self):
        """The span of time on the screen."""
        units = {"s": 1, "ms": 1e-3, "µs": 1e-6}
        found = re.fullmatch(r"(\S+) (\S+) to (\S+) (\S+)", self.words("range"))
        return float(found[3]) * units[found[4]] - float(found[1]) * units[found[2]]


def written(folder, made):
    """The page of a capture."""
    made.write(folder / "c.json")
    assert main(["audit", "report", str(folder / "c.json"), "--html", str(folder / "page.html")]) == 0
    return folder / "page.html"


@pytest.fixture
def page(browser, tmp_path):
    return Page(browser, written(tmp_path, capture(SMALL)))


@pytest.fixture(scope="module")
def hundred_thousand():
    return many(MANY)


@pytest.fixture(scope="module")
def big_file(tmp_path_factory, hundred_thousand):
    return written(tmp_path_factory.mktemp("big"), hundred_thousand)


@pytest.fixture
def big(browser, big_file):
    return Page(browser, big_file)


def test_a_hundred_thousand_allocations_open_in_time(big):
    assert f"{MANY:,} of {MANY:,} records" in big.words("count")
    assert big.hover(0.1, 0.001) is not None  # it is drawn
    assert big.seconds < OPENS_WITHIN


def test_only_the_rows_on_the_screen_are_elements(big):
    assert 10 < len(big.rows()) < 40


def test_a_search_among_them_answers_at_once_with_the_right_rows(big, hundred_thousand):
    seconds = big.search("layer7.act part7.py:3")
    expected = [e for e in hundred_thousand.backends[0].entries if e.tag == "layer7.act" and ":3" in e.site]
    assert big.words("count").startswith(f"{len(expected):,} of {MANY:,} records, {sum(e.nbytes for e in expected):,}")
    assert {(row[3], row[4].split(":")[0]) for row in big.rows()} == {("layer7.act", "part7.py")}
    assert seconds < ANSWERS_WITHIN


def test_the_last_row_can_be_scrolled_to(big, hundred_thousand):
    big.press("Bytes")  # ascending now
    big.js("const t = document.getElementById('table'); t.scrollTop = t.scrollHeight")
    big.settle()
    assert big.rows()[-1][1] == f"{max(e.nbytes for e in hundred_thousand.backends[0].entries):,}"


def test_the_totals_are_the_captures(page):
    assert page.js("return [...document.querySelectorAll('.tile b')].map(b => b.textContent)") == [
        *("5 MiB", "4 MiB in 2", "4", "NVIDIA H200")
    ]


def test_rows_are_the_largest_first_and_say_what_leaked(page):
    assert [(row[1], row[3], row[4], row[7]) for row in page.rows()] == [
        ("4,194,304", "weights", "train.py:10", "leaked"),
        ("1,048,576", "act", "model/layer.py:20", "model/layer.py:1020"),
        ("1,048,576", MARKUP, "train.py:30", "train.py:1030"),
        ("524,288", "staging", "train.py:50", "train.py:1050"),
        ("0", "", "train.py:40", "leaked"),
    ]


@pytest.mark.parametrize(
    ("heading", "column", "values"),
    [
        ("#", 0, ["80,000", "70,000", "60,000", "2", "1"]),
        ("Tag", 3, ["", MARKUP, "act", "staging", "weights"]),
        ("Lived", 6, [ENDLESS, ENDLESS, "50 ms", "30 ms", "20 ms"]),
    ],
)
def test_a_heading_sorts(page, heading, column, values):
    page.press(heading)
    assert [row[column] for row in page.rows()] == values


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        ("weights", ["1"]),
        ("LAYER.py", ["2"]),
        ("pinned", ["80,000"]),
        ("#60000", ["60,000"]),
        ("0x7f0000100000", ["1"]),
        ("train.py staging", ["80,000"]),
        ("nothing such", []),
    ],
)
def test_a_search_narrows_the_rows(page, words, numbers):
    page.search(words)
    assert [row[0] for row in page.rows()] == numbers


def test_a_search_dims_the_other_blocks(page):
    def colour(across, up):
        return page.js(
            "const c = document.getElementById('blocks'), w = c.width - 62, h = c.height - 24;"
            "return [...c.getContext('2d').getImageData(62 + arguments[0] * w, 4 + (1 - arguments[1]) * h, 1, 1).data]",
            *(across, up),
        )

    act, img = colour(0.02, 0.8), colour(0.075, 0.8)
    page.search("layer.py")
    page.settle()
    assert colour(0.02, 0.8) == act
    assert sum(colour(0.075, 0.8)) > sum(img)  # nearer to the white behind


def test_leaks_alone(page):
    page.press("Leaked")
    assert [row[0] for row in page.rows()] == ["1", "70,000"]


def test_what_made_up_the_peak_alone(page):
    page.press("At the peak")
    assert [row[0] for row in page.rows()] == ["1", "2"]


def test_groups_have_the_figures_of_the_tables_and_lead_to_their_records(page):
    page.press("By file")
    assert page.rows()[0] == ["train.py", "3", "5,767,168", "4,194,304", "5,767,168", "1", "4,194,304"]
    page.js("document.querySelectorAll('.row')[1].click()")
    assert [row[0] for row in page.rows()] == ["2"]


def test_an_allocation_under_the_pointer_is_described(page):
    words = page.hover(0.5, 0.3)
    assert words.startswith("weights device")
    assert "leaked" in words
    assert "4,194,304 bytes (4 MiB)" in words
    assert "train.py:10" in words
    assert "never by the program" in words
    assert "lived" not in words


def test_a_tag_is_text_and_never_markup(page):
    assert page.hover(0.075, 0.8).startswith(f"{MARKUP} device")


def test_where_nothing_is_nothing_is_described(page):
    assert page.hover(0.9, 0.9) is None


def test_the_wheel_zooms_around_the_pointer(page):
    assert page.seconds_shown() == pytest.approx(1)
    page.wheel(-240)
    assert page.seconds_shown() == pytest.approx(0.62, abs=0.01)
    assert page.hover(0.5, 0.3).startswith("weights")


def test_shift_and_wheel_zoom_the_bytes_alone(page):
    assert page.hover(0.02, 0.8).startswith("act")
    for _ in range(6):
        page.wheel(-240, shift=True)
    assert page.seconds_shown() == pytest.approx(1)
    assert page.hover(0.02, 0.8).startswith("weights")


def test_dragging_moves_what_is_zoomed(page):
    page.wheel(-240)
    before = page.words("range")
    page.mouse().drag_and_drop_by_offset(page.canvas(), 200, 0).perform()
    page.settle()
    assert page.words("range") != before
    assert page.seconds_shown() == pytest.approx(0.62, abs=0.01)


def test_dragging_over_the_whole_run_picks_a_range_and_a_button_resets_it(page):
    page.mouse().drag_and_drop_by_offset(page.canvas("overview"), 130, 0).perform()
    page.settle()
    assert page.seconds_shown() == pytest.approx(0.1, abs=0.01)
    page.press("Whole run")
    page.settle()
    assert page.seconds_shown() == pytest.approx(1)


def test_a_click_on_a_block_selects_its_row(page):
    page.hover(0.02, 0.8)
    page.mouse().click().perform()
    page.settle()
    assert page.js("return document.querySelector('.row.selected').children[3].textContent") == "act"


def test_a_capture_without_a_backend_says_so(browser, tmp_path):
    page = Page(browser, written(tmp_path, capture()))
    assert page.words("tiles") == "No backend was opened."


def test_another_backend_can_be_chosen(browser, tmp_path):
    page = Page(browser, written(tmp_path, capture(SMALL, SMALL[:1])))
    page.js("const s = document.getElementById('backend'); s.value = 1; s.dispatchEvent(new Event('change'))")
    assert page.words("count").startswith("1 of 1 records")


def test_nothing_is_asked_of_the_network_and_the_console_stays_empty(page):
    for button in ("Theme", "By tag", "By call site", "By kind", "Allocations"):
        page.press(button)
    page.wheel(-100)
    page.settle()
    requests = [line for line in page.driver.get_log("performance") if "Network.requestWillBeSent" in line["message"]]
    asked = [re.search(r'"url":"([^"]*)"', line["message"])[1] for line in requests]
    assert [url for url in asked if not url.startswith(("file://", "data:"))] == []
    assert page.driver.get_log("browser") == []
