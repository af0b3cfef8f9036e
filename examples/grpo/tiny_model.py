"""A language model that learns a task in minutes on two CPU cores, and is made in a second.

It is a Qwen2 with 2 layers, hidden size 128 and 0.4 million random weights, a byte-level tokenizer (one token per byte)
and a chat template, in a folder in Hugging Face format. Nothing is downloaded.

    python -m examples.grpo.tiny_model runs/tiny
"""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["CHAT_TEMPLATE", "make_tiny_model"]

SPECIAL_TOKENS = ["<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tiny_model(directory: str | Path, seed: int = 0) -> Path:
    """Write the model and its tokenizer to `directory`, and return it. The same seed gives the same weights."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)

    # A byte-level BPE without merges: each of the 256 bytes is a token, whatever the text.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(SPECIAL_TOKENS)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|pad|>", chat_template=CHAT_TEMPLATE,
        model_max_length=256,
    )
    tokenizer.save_pretrained(path)

    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4,  # head size 32: vLLM's CPU attention refuses 16
        max_position_embeddings=256, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).to(torch.float32)
    model.save_pretrained(path)
    return path


if __name__ == "__main__":
    print(make_tiny_model(sys.argv[1] if len(sys.argv) > 1 else "runs/tiny"))
