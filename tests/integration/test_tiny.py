"""Tiny models and the loading of model folders."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaTokenizer, Qwen2Tokenizer

from asyncrl.coldstart.texts import environment_texts
from asyncrl.config.load import ConfigError, load
from asyncrl.config.model import TinyConfig
from asyncrl.config.prompt import PromptConfig
from asyncrl.env import find_env
from asyncrl.model import tiny
from asyncrl.model.load import ModelNotFound, load_causal_lm, load_tokenizer
from asyncrl.model.tiny import TAGS, make_tiny
from asyncrl.ops.preflight import preflight

pytestmark = pytest.mark.integration

CONFIG = TinyConfig(layers=1, hidden=64, heads=2, kv_heads=1, intermediate=32, vocab=512, max_length=128)
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
PROMPT = PromptConfig(style="compact", history=2)


def texts() -> list[str]:
    return list(environment_texts(find_env("pantry"), "train", PROMPT, 40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", CONFIG, texts(), seed=3)


def test_transformers_loads_it_as_any_other_model(folder):
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "qwen3"
    assert model.config.vocab_size == len(tokenizer) <= 512
    assert model.config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert torch.isfinite(model(torch.tensor([[5, 6, 7]])).logits).all()


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads(tmp_path, tied):
    model = load_causal_lm(make_tiny(tmp_path, CONFIG.model_copy(update={"tied": tied}), texts()))
    shared = model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    assert shared is tied


def test_common_words_and_tags_are_single_tokens(folder):
    tokenizer = load_tokenizer(folder)
    for word in (*TAGS, " kitchen", " cupboard", " towel", "open", "go", "seek", " shut", "user", "assistant"):
        assert len(tokenizer.encode(word, add_special_tokens=False)) == 1, word


@pytest.mark.parametrize("text", ["<think>now go</think>\n<action>go study</action>", "naïve 蛋 \U0001f373\t\x00  x"])
@pytest.mark.parametrize("skip", [True, False])
def test_any_text_survives_and_tags_do_whether_special_tokens_are_skipped_or_not(folder, text, skip):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=skip) == text


def test_the_same_seed_makes_the_same_files(folder, tmp_path):
    same, other = make_tiny(tmp_path / "same", CONFIG, texts(), 3), make_tiny(tmp_path / "other", CONFIG, texts(), 4)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (same / name).read_bytes() == (folder / name).read_bytes()
    assert (other / "model.safetensors").read_bytes() != (folder / "model.safetensors").read_bytes()


def test_making_a_model_leaves_the_global_generator_alone(tmp_path):
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    make_tiny(tmp_path, CONFIG, ["a"])
    assert torch.equal(torch.rand(1), expected)


def test_loading_says_what_is_missing(folder, tmp_path):
    with pytest.raises(ModelNotFound, match="no such folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ModelNotFound, match=r"no config\.json, no weights, no tokenizer"):
        load_causal_lm(tmp_path)


@pytest.mark.parametrize("kind", [Qwen2Tokenizer, LlamaTokenizer])
def test_a_tokenizer_with_a_class_of_its_own_is_read_alike(folder, tmp_path, kind):
    words = json.loads((folder / "tokenizer.json").read_text())["model"]
    vocab = words["vocab"] | {
        word: len(words["vocab"]) + i for i, word in enumerate(("<unk>", "<s>", "</s>", "\u2581"))
    }
    path = shutil.copytree(folder, tmp_path / "model")
    (path / "tokenizer.json").unlink()
    made = kind(vocab=vocab, merges=[tuple(pair) for pair in words["merges"]])
    made.chat_template = load_tokenizer(folder).chat_template
    made.add_tokens(["<think>"])
    made.save_pretrained(path)
    ours, theirs = load_tokenizer(path), AutoTokenizer.from_pretrained(path)
    assert type(theirs) is kind
    assert ours.eos_token_id == theirs.eos_token_id
    for text in ("go to the  kitchen", "<think>now</think>\n\n<action>open 3", " na\u00efve don't 1234", ""):
        for special in (False, True):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            assert ours.decode(ids) == theirs.decode(ids)
        turn = [{"role": "user", "content": text}]
        assert ours.apply_chat_template(turn, tokenize=False) == theirs.apply_chat_template(turn, tokenize=False)


def test_a_tokenizer_without_chat_template_is_refused(folder, tmp_path):
    tokenizer = load_tokenizer(folder)
    load_causal_lm(folder).save_pretrained(tmp_path)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no chat template"):
        load_tokenizer(tmp_path)


def test_dtype(folder):
    assert load_causal_lm(folder, "bfloat16").dtype is torch.bfloat16


def test_a_tokenizer_without_reasoning_tags_is_refused_before_a_run_that_cuts_thinking(folder, tmp_path, monkeypatch):
    def problems(path: Path) -> str:
        lines = [f"model.path={path}", "thinking={cap: 16, min_tokens: 4, window: 2}"]
        try:
            preflight(load(QUICKSTART, ["sft=null", *lines]))
        except ConfigError as error:
            return str(error)
        return ""

    monkeypatch.setattr(tiny, "TAGS", ())
    without = make_tiny(tmp_path / "without", CONFIG, ["go kitchen"])
    assert problems(folder) == ""
    assert "thinking.tti: <think> and its closer must be single tokens" in problems(without)
