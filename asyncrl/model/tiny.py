"""A small model made on the spot: Qwen3 architecture, random weights, a tokenizer of the environment's own words.

Invariants:

* The folder is in Hugging Face format; Transformers and vLLM load it as they load any other.
* The tokenizer is byte-level: any text survives encoding and decoding. Tags are single tokens and not special, so
  they survive decoding whether special tokens are skipped or not.
* Same config, texts and seed: same files' contents.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer

from asyncrl.config.model import TinyConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TAGS = tuple(f"<{slash}{tag}>" for tag in ("think", "explore", "action") for slash in ("", "/"))
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, the template of the Qwen family."""
WORDS = Regex(r" ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]|\n+|\s")
"""What merges stay within: a word or a sign with the space before it, one digit, a run of line ends."""


def train_tokenizer(texts: Iterable[str], vocab: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most ``vocab`` tokens, all 256 bytes among them."""
    from transformers import PreTrainedTokenizerFast

    bpe = RustTokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(WORDS, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(TAGS),
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["user\nassistant\n", *texts], trainer)
    bpe.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, pad_token=PAD, additional_special_tokens=[START]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_tiny(path: str | Path, config: TinyConfig, texts: Iterable[str], seed: int = 0) -> Path:
    """Write model and tokenizer to ``path``; ``texts`` (of ``coldstart.texts``) are what the latter is trained on."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = Path(path)
    tokenizer = train_tokenizer(texts, config.vocab)
    tokenizer.model_max_length = config.max_length
    shape = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.hidden // config.heads,
        max_position_embeddings=config.max_length,
        tie_word_embeddings=config.tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.1,  # at a width of about 100, the usual 0.02 learns several times slower
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(shape)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
