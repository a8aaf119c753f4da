"""WebShop on a small catalogue of our own, and on the published small data where it lies in the data folder."""

import hashlib
import importlib
import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import envs.webshop
from asyncrl.env import EnvSpec, find_env
from asyncrl.types import Step, Task
from envs.check import MALFORMED, check
from envs.data_home import data_folder
from envs.webshop import nouns
from envs.webshop.catalogue import Catalogue, find_files, load
from envs.webshop.env import WebShop
from envs.webshop.pages import Session, actions, follow, text

SAMPLE = Path(__file__).parents[1] / "data" / "webshop"
SHOP = load(find_files(SAMPLE, "small"))
SHIRT, LAMP = SHOP.by_asin["BSHIRT0001"], SHOP.by_asin["BLAMPX0011"]


def digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def shop(**options: object) -> WebShop:
    return WebShop(data=str(SAMPLE), **options)  # type: ignore[arg-type]


def play(env: WebShop, *moves: str) -> Step:
    return [env.step(move) for move in moves][-1]


def task_of(asin: str, *options: str) -> Task:
    found = [i for i, g in enumerate(SHOP.synthetic) if g.product.asin == asin and set(g.options) == set(options)]
    return Task("webshop", str(found[0]))


# --- splits and goals


def test_the_splits_are_the_published_ones() -> None:
    sizes = {"train": 6410, "test": 500, "human_train": 10587, "human_eval": 1000, "human_test": 500}
    assert {name: len(WebShop.tasks(name)) for name in sizes} == sizes
    assert WebShop.tasks("test")[::499] == ["0", "499"] and WebShop.tasks("train")[::6409] == ["500", "6909"]
    assert digest([one for name in sizes for one in WebShop.tasks(name)]) == "9bd1ee63f3a0fe82"
    with pytest.raises(ValueError, match=r"no split 'dev'; known: train, .*human_test"):
        WebShop.tasks("dev")


def test_goals_and_their_order_are_fixed() -> None:
    """Another order, another draw of a price limit, or another price changes the digest."""
    assert len(SHOP.synthetic) == 517 and len(SHOP.human) == 2
    assert digest([goal.instruction for goal in SHOP.synthetic]) == "86262b9adda4c391"


def test_a_goal_names_options_and_price() -> None:
    goal = SHOP.synthetic[int(task_of("BSHIRT0001", "dark green", "large").id)]
    start = (
        "Find me machine wash men's shirts with long sleeve with color: dark green, and size: large, and price lower"
    )
    assert goal.instruction == f"{start} than {goal.price_limit:.2f} dollars"
    assert goal.price_limit in (40.0, 50.0, 60.0) and goal.attributes == ("machine wash", "long sleeve")
    free = next(goal for goal in SHOP.synthetic if goal.product.asin == "BSHEET0007")
    assert free.price_limit == float("inf") and "price" not in free.instruction


def test_every_combination_of_options_is_a_goal() -> None:
    counts = {p.asin: sum(goal.product is p for goal in SHOP.synthetic) for p in SHOP.products}
    assert counts["BSHIRT0001"] == counts["BMUGXX0008"] == 64
    assert counts["BSHAMP0009"] == 1 and counts["BSHAMP0010"] == counts["BBOLDX0012"] == 0 and counts["BLAMPX0011"] == 4


def test_goals_that_people_wrote() -> None:
    assert {goal.product.asin for goal in SHOP.human} == {"BSHIRT0001", "BBOLDX0012"}  # one has no attributes: left out
    written = next(goal for goal in SHOP.human if goal.product is SHIRT)
    assert written.instruction.startswith("i want a dark green linen shirt in large, and price lower than ")
    env = shop()
    number = SHOP.human.index(written)
    env.reset(Task("webshop", f"human/{number}"))
    step = play(env, "search[linen shirt]", "click[bshirt0001]", "click[dark green]", "click[large]", "click[buy now]")
    assert step.info["score"] == 1.0


@pytest.mark.parametrize("bad", ["", "x", "-1", "³", "517", "human/2", "human/", "0/human"])
def test_a_wrong_task_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match=r"webshop: no task .* this catalogue has (517|2) "):
        shop().reset(Task("webshop", bad))


# --- reading the catalogue


def test_products_are_read_as_published() -> None:
    assert len(SHOP.products) == 12  # a repeated number, "nan" and one that is too long are left out
    assert (SHIRT.price, SHIRT.price_tag) == (24.99, "$24.99")
    flannel = SHOP.by_asin["BSHIRT0002"]
    assert 19.5 <= flannel.price <= 34.0 and flannel.price_tag == "$19.5 to $34.0"
    assert SHOP.by_asin["BMUGXX0008"].price == 100.0 and SHOP.by_asin["BSHEET0007"].price_tag == "$1049.0"
    assert SHIRT.categories == {"Clothing", "Men", "Shirts", "Casual Shirts"}
    assert [name for name, _ in SHIRT.options] == ["color", "size"]
    assert SHOP.by_asin["BPILLO0006"].options[1][1][-2:] == ("12 | 20", "14 | 22")
    assert SHOP.by_asin["BSOCKS0005"].bullets == ("Cushioned heel",)
    assert SHOP.by_asin["BSHAMP0010"].options == () and SHOP.by_asin["BSHAMP0010"].attributes == ("damaged hair",)
    assert SHOP.by_asin["BBOLDX0012"].attributes == ("DUMMY_ATTR",)
    assert LAMP.document == "Two-Way Reading Lamp Bends both ways. LED fit: small, large, and base: small, heavy"


def test_a_catalogue_of_lines_reads_as_the_list_does(tmp_path: Path) -> None:
    for name in ("items_ins_v2_1000.json", "title_nouns.json"):
        shutil.copy(SAMPLE / name, tmp_path)
    listed = json.loads((SAMPLE / "items_shuffle_1000.json").read_text())
    lines = "\n".join(json.dumps({"id": one["asin"], "product": one}) for one in listed)
    (tmp_path / "products_1k.jsonl").write_text(lines)
    again = load(find_files(tmp_path, "small"))
    assert again.products == SHOP.products and again.synthetic == SHOP.synthetic and again.human == ()


def test_every_slot_of_a_process_shares_one_catalogue() -> None:
    assert shop()._shop is shop()._shop is SHOP
    assert isinstance(SHOP, Catalogue)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "shop"))


@pytest.mark.parametrize("name", ["items_shuffle_1000.json", "items_ins_v2_1000.json", "title_nouns.json"])
def test_a_missing_file_is_named_with_its_remedy_before_anything_is_read(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(
        ValueError, match=rf"{name} is missing; (put WebShop's data .*ASYNCRL_DATA|make it with: python)"
    ):
        WebShop(data=str(folder))


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (
            "items_shuffle_1000.json",
            b'[{"asin": "B1"',
            r"items_shuffle_1000.json is damaged \(Expecting .*; put WebShop's",
        ),
        ("items_shuffle_1000.json", b"[]", "holds no product"),
        ("items_shuffle_1000.json", b'["B1"]', "product 0 of .* is damaged"),
        ("items_shuffle_1000.json", b'[{"asin": "BSHIRT0001"}]', r"product 0 of .* is damaged .KeyError\('small_descr"),
        ("items_ins_v2_1000.json", b"", "items_ins_v2_1000.json is damaged"),
        ("items_ins_v2_1000.json", b"[]", r"items_ins_v2_1000.json is damaged \(no JSON object"),
        ("items_ins_v2_1000.json", b"\xff\xfe\x00", "items_ins_v2_1000.json is damaged"),
        (
            "items_ins_v2_1000.json",
            b'{"BSHIRT0001": {"instruction": "x"}}',
            "items_ins_v2_1000.json.*'BSHIRT0001' is damaged",
        ),
        ("items_human_ins.json", b'{"BSHIRT0001": [{}]}', "items_human_ins.json.*'BSHIRT0001' is damaged"),
        (
            "title_nouns.json",
            b'{"BSHIRT0001": []}',
            "lacks 11 products, 'BSHIRT0002' first; make it again with: python",
        ),
        ("title_nouns.json", b"[1", "title_nouns.json is damaged"),
        ("title_nouns.json", b"[]", r"title_nouns.json is damaged \(no JSON object"),
    ],
)
def test_a_damaged_file_is_named(folder: Path, name: str, content: bytes, problem: str) -> None:
    (folder / name).write_bytes(content)
    env = WebShop(data=str(folder))
    with pytest.raises(ValueError, match=problem):
        env.reset(Task("webshop", "0"))


@pytest.mark.parametrize("price", ["$", "12.99", "$1.2.3", {"low": 1}])
def test_a_damaged_price_is_named(folder: Path, price: object) -> None:
    path = folder / "items_shuffle_1000.json"
    listed = json.loads(path.read_text())
    listed[3]["pricing"] = price
    path.write_text(json.dumps(listed))
    with pytest.raises(ValueError, match=r"product 3 of .*items_shuffle_1000.json is damaged"):
        load(find_files(folder, "small"))


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="no catalogue 'large'; known: small, full"):
        shop(catalogue="large")
    with pytest.raises(ValueError, match=r"items_shuffle.json is missing"):
        shop(catalogue="full")
    with pytest.raises(ValueError, match="max_turns must be at least 1"):
        shop(max_turns=0)


@pytest.mark.parametrize("package", ["rapidfuzz", "Stemmer"])
def test_a_missing_package_is_answered(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"pip install 'asyncrl\[webshop\]'"):
        importlib.reload(envs.webshop)


def test_the_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ASYNCRL_DATA", "~/data")
    assert data_folder("webshop", "~/here") == tmp_path / "here"
    assert data_folder("webshop") == tmp_path / "data" / "webshop"
    monkeypatch.delenv("ASYNCRL_DATA")
    assert data_folder("webshop") == tmp_path / ".cache" / "asyncrl" / "webshop"


# --- pages


def walk(*moves: str) -> Session:
    session = Session()
    for move in moves:
        session = follow(SHOP, session, move)
    return session


FOUND = walk("search[shirt]")
ITEM = walk("search[lamp]", "click[blampx0011]")


def test_the_first_page() -> None:
    assert text(SHOP, Session()) == "'Search'"
    assert actions(SHOP, Session()) == ("search[<your query>]", "click[search]")
    assert walk("click[search]") == Session()


def test_a_results_page() -> None:
    assert text(SHOP, FOUND) == (
        "'Back to Search' [SEP] 'Page 1 (Total results: 2)' [SEP] 'Next >' [SEP] "
        "'BSHIRT0001' [SEP] 'Harbor Lane Men's Linen Shirt Button Down Summer Top' [SEP] '$24.99' [SEP] "
        "'BSHIRT0002' [SEP] 'Northwind Men's Flannel Shirt Plaid Winter Top' [SEP] '$19.5 to $34.0'"
    )
    listed = ("click[back to search]", "click[next >]", "click[bshirt0001]", "click[bshirt0002]")
    assert actions(SHOP, FOUND) == listed


def test_results_are_ten_a_page_and_the_next_page_is_always_offered() -> None:
    first = walk("search[shirt dress coat socks pillow sheet mug shampoo conditioner lamp paint]")
    second = follow(SHOP, first, "click[next >]")
    assert len(actions(SHOP, first)) == 2 + 10
    assert text(SHOP, second).startswith(
        "'Back to Search' [SEP] 'Page 2 (Total results: 12)' [SEP] '< Prev' [SEP] 'Next >'"
    )
    assert len(actions(SHOP, second)) == 3 + 2
    assert not set(actions(SHOP, first)[2:]) & set(actions(SHOP, second)[3:])
    third = follow(SHOP, second, "click[next >]")
    assert actions(SHOP, third) == ("click[back to search]", "click[< prev]", "click[next >]")
    assert follow(SHOP, third, "click[< prev]") == second and follow(SHOP, second, "click[< prev]") == first


def test_a_search_without_results() -> None:
    assert text(SHOP, walk("search[zeppelin]")) == "'Back to Search' [SEP] 'Page 1 (Total results: 0)' [SEP] 'Next >'"


def test_a_product_page() -> None:
    assert text(SHOP, ITEM) == (
        "'Back to Search' [SEP] '< Prev' [SEP] 'fit' [SEP] 'small' [SEP] 'large' [SEP] 'base' [SEP] 'small' [SEP] "
        "'heavy' [SEP] 'Two-Way Reading Lamp' [SEP] 'Price: $31.0' [SEP] 'Rating: N.A.' [SEP] 'Description' [SEP] "
        "'Features' [SEP] 'Reviews' [SEP] 'Buy Now'"
    )
    assert actions(SHOP, ITEM) == (
        *("click[back to search]", "click[< prev]", "click[description]", "click[features]", "click[reviews]"),
        *("click[buy now]", "click[small]", "click[large]", "click[heavy]"),
    )


def test_subpages_lead_back_and_keep_the_options() -> None:
    chosen = follow(SHOP, ITEM, "click[large]")
    shown = {
        "description": "'Bends both ways.'",
        "features": "'LED' [SEP] 'Two brightness levels'",
        "reviews": "",
    }
    for page, content in shown.items():
        below = follow(SHOP, chosen, f"click[{page}]")
        assert text(SHOP, below) == " [SEP] ".join(filter(None, ["'Back to Search' [SEP] '< Prev'", content]))
        assert actions(SHOP, below) == ("click[back to search]", "click[< prev]")
        assert follow(SHOP, below, "click[< prev]") == chosen


def test_options_are_replaced_and_the_last_option_with_a_value_takes_it() -> None:
    assert follow(SHOP, ITEM, "click[large]").options == (("fit", "large"),)
    assert follow(SHOP, ITEM, "click[small]").options == (("base", "small"),)
    both = follow(SHOP, follow(SHOP, ITEM, "click[heavy]"), "click[large]")
    assert follow(SHOP, both, "click[small]").options == (("base", "small"), ("fit", "large"))


def test_leaving_a_product_forgets_its_options() -> None:
    chosen = follow(SHOP, ITEM, "click[large]")
    assert follow(SHOP, chosen, "click[< prev]") == Session("results", "lamp")
    assert follow(SHOP, chosen, "click[back to search]") == Session()
    assert follow(SHOP, chosen, "search[mug]") == Session("results", "mug")


@pytest.mark.parametrize(
    "action",
    [
        *("", "search", "search[]", "click[]", "click[bshirt0001", "click[bmugxx0008]", "click[buy now]", "buy now"),
        *("click[< prev]", "press[next >]", "click[next >] [", "xclick[next >]", *MALFORMED),
    ],
)
def test_what_the_page_does_not_offer_does_nothing(action: str) -> None:
    if action != "click[next >] [":
        assert follow(SHOP, FOUND, action) == FOUND
    else:
        assert follow(SHOP, FOUND, action).number == 2  # what follows an action is not read


def test_actions_are_read_without_case_and_queries_hold_brackets() -> None:
    assert walk("  Search[Lamp]\n", "CLICK[BLAMPX0011]") == ITEM
    assert walk("search[lamp [led] ]").query == "lamp [led] "


def test_the_published_search_prefixes_are_words() -> None:
    assert walk("search[<r> lamp]", "click[blampx0011]").asin == "BLAMPX0011"
    assert text(SHOP, walk("search[<q>]")) == text(SHOP, walk("search[<a>]")).replace("<a>", "<q>")


@settings(max_examples=40)
@given(st.lists(st.integers(0, 10**6), max_size=30))
def test_every_listed_click_does_something(choices: list[int]) -> None:
    """But for the search button and an option chosen already."""
    session = walk("search[machine wash men's shirt lamp mug]")
    for choice in choices:
        offered = actions(SHOP, session)
        if not offered:
            assert session.page == "done"
            break
        move = offered[choice % len(offered)]
        after = follow(SHOP, session, move)
        value = move.removeprefix("click[").removesuffix("]")
        assert after != session or value == "search" or value in dict(session.options).values()
        session = after


# --- episodes


def test_the_right_purchase_succeeds() -> None:
    env = shop()
    first = env.reset(task_of("BSHIRT0001", "dark green", "large"))
    assert first.text == "'Search'" and first.goal.startswith("Find me machine wash men's shirts")
    step = play(env, "search[men's linen shirt]", "click[bshirt0001]", "click[dark green]", "click[large]")
    assert (step.reward, step.done, dict(step.info)) == (0.0, False, {})
    step = env.step("click[buy now]")
    assert (step.reward, step.terminated, step.truncated) == (1.0, True, False)
    assert step.observation.text == "'Thank you for shopping with us!'" and step.observation.actions == ()
    parts = {"type_score": 1.0, "attributes_score": 1.0, "options_score": 1.0, "price_score": 1.0}
    assert step.info == {"success": True, "score": 1.0, **parts}
    with pytest.raises(RuntimeError, match="the episode is over; call reset first"):
        env.step("search[more]")


def test_a_wrong_purchase_is_scored_and_earns_nothing() -> None:
    """Asked: machine wash, long sleeve, plaid; color and size. Bought: the linen shirt, no plaid, one option."""
    env = shop()
    env.reset(task_of("BSHIRT0002", "dark green", "large"))
    step = play(env, "search[linen shirt]", "click[bshirt0001]", "click[large]", "click[buy now]")
    assert (step.reward, step.terminated, step.info["success"]) == (0.0, True, False)
    assert step.info["score"] == pytest.approx((2 + 1 + 1) / (3 + 2 + 1))


def test_turns_run_out() -> None:
    env = shop(max_turns=2)
    env.reset(Task("webshop", "0"))
    assert not env.step("nothing").done
    step = env.step("search[shirt]")
    assert (step.reward, step.terminated, step.truncated) == (0.0, False, True)
    assert step.info == {"success": False, "score": 0.0}


def test_a_purchase_on_the_last_turn_counts() -> None:
    env = shop(max_turns=3)
    env.reset(task_of("BSHAMP0009"))
    step = play(env, "search[shampoo]", "click[bshamp0009]", "click[buy now]")
    assert (step.reward, step.terminated, step.truncated) == (1.0, True, False)


def test_a_snapshot_is_small_and_holds_no_catalogue() -> None:
    env, copy = shop(), shop()
    env.reset(task_of("BSHIRT0001", "dark green", "large"))
    play(env, "search[men's linen shirt]", "click[bshirt0001]", "click[dark green]")
    kept = pickle.dumps(env.snapshot())
    assert len(kept) < 400
    seen = env.step("click[large]").observation
    copy.restore(pickle.loads(kept))
    assert copy.step("click[large]").observation.same_as(seen)
    assert copy.step("click[buy now]").info["score"] == env.step("click[buy now]").info["score"] == 1.0


def test_the_expert_buys_every_goal_that_can_be_bought() -> None:
    env = shop()
    failed = [i for i in range(len(SHOP.synthetic)) if env.expert(Task("webshop", str(i))) is None]
    # Both options of the lamp have a value "small", which a click gives to the second, so this goal is out of reach.
    assert failed == [int(task_of("BLAMPX0011", "small", "heavy").id)]


def test_the_expert_searches_by_the_goal_and_respects_the_turns() -> None:
    task = task_of("BSHIRT0001", "dark green", "large")
    actions_ = shop().expert(task)
    assert actions_ is not None and actions_[0].startswith(
        "search[Find me machine wash men's shirts with long sleeve with"
    )
    assert actions_[-1] == "click[buy now]" and len(actions_) == 5
    assert shop(max_turns=4).expert(task) is None


@pytest.mark.timeout(120)
def test_it_keeps_the_protocol() -> None:
    report = check(EnvSpec("webshop", find_env("webshop").target, {"data": str(SAMPLE)}), split="test", tasks=3)
    assert report.passed, "\n".join(report.lines())


# --- the table of title nouns


def test_nouns_are_written_as_the_tagger_sees_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Token:
        def __init__(self, word: str) -> None:
            self.text, self.pos_ = word, {"Lamp": "NOUN", "Two": "NUM"}.get(word, "PROPN")

    class Tagger:
        def pipe(self, titles: list[str]) -> list[list[Token]]:
            return [[Token(word) for word in title.split()] for title in titles]

    class Spacy:
        @staticmethod
        def load(model: str, disable: list[str]) -> Tagger:
            assert (model, disable) == ("en_core_web_lg", ["parser", "ner"])
            return Tagger()

    monkeypatch.setitem(sys.modules, "spacy", Spacy)
    (folder / "title_nouns.json").unlink()
    nouns.main([str(folder)])
    made = load(find_files(folder, "small"))
    assert made.by_asin["BLAMPX0011"].title_nouns == ("two-way", "reading", "lamp")


def test_nouns_without_a_tagger_or_products_say_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "spacy", None)
    with pytest.raises(SystemExit):
        nouns.main([str(folder)])
    assert "pip install spacy && python -m spacy download en_core_web_lg" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        nouns.main([str(folder), "--catalogue", "full"])
    assert "holds no items_shuffle.json" in capsys.readouterr().err


# --- the published small catalogue


@pytest.fixture(scope="module")
def real() -> Catalogue:
    try:
        files = find_files(data_folder("webshop"), "small")
    except ValueError as missing:
        pytest.skip(str(missing))
    return load(files)


def test_the_small_catalogue_has_the_known_numbers(real: Catalogue) -> None:
    assert len(real.products) == 1000 and len(real.synthetic) == 6910
    assert digest([goal.instruction for goal in real.synthetic]) == "1a2bcb4ef1fcb15d"


def test_a_title_finds_its_product(real: Catalogue) -> None:
    pages = [(product, real.search.top(product.title, 10)) for product in real.products]
    assert sum(product in [real.products[one] for one in page] for product, page in pages) >= 990


def test_the_known_answer_of_every_test_goal_earns_the_full_score(real: Catalogue) -> None:
    env = WebShop()
    assert all(env.expert(Task("webshop", one)) is not None for one in WebShop.tasks("test"))


def test_the_small_catalogue_keeps_the_protocol(real: Catalogue) -> None:
    report = check(find_env("webshop"), tasks=5)
    assert report.passed, "\n".join(report.lines())
