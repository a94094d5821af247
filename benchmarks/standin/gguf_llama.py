"""A Llama in a GGUF file, turned into a Hugging Face checkpoint in float32."""

from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def convert(gguf_file: Path, folder: Path) -> None:
    """Write the model in `gguf_file`, with a tokenizer of the SmolLM family, to `folder`.

    Raises RuntimeError if tensors are missing.
    """
    config = AutoConfig.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    model = LlamaForCausalLM(config)
    # Not from_pretrained, which takes what it reads from a GGUF file for quantised, and whose
    # models then cannot be saved.
    tensors = load_gguf_checkpoint(gguf_file, return_tensors=True, model_to_load=model)["tensors"]
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    # transformers does not know the pre-tokenizer "smollm", which takes out digits first: without
    # this, the spaces and the lines before a number would be other tokens.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.save_pretrained(folder)
