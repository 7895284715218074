"""The five families of the paper: one record each, and how a document must begin."""

from dataclasses import dataclass

from data import BadInput


@dataclass(frozen=True)
class Family:
    """A family: its default model here, the paper's model, and what the capture must get right.

    name: what the user types. model_types: transformers' names of the architecture. label: name of the
    default model in tables and folders. folder: its folder in data/models; None: it comes in a package. hub:
    the model the paper measured. length: default tokens of a document of the default model. begins,
    hub_begins: the token that must open every document of the default and of the Hub model; "" means none.
    special: what the architecture does to queries, keys or logits.
    """

    name: str
    model_types: tuple[str, ...]
    label: str
    folder: str | None
    hub: str
    length: int
    begins: str
    hub_begins: str
    special: str


# The four embedded checkpoints learnt to rest on <s>, and their tokenizer does not write it.
FAMILIES = {
    family.name: family
    for family in (
        Family(
            "qwen",
            ("qwen2",),
            "embedded-qwen",
            "qwen",
            "Qwen/Qwen2.5-1.5B",
            1024,
            "<s>",
            "",
            "q, k, v biases",
        ),
        Family(
            "qwen3",
            ("qwen3",),
            "embedded-qwen3",
            "qwen3",
            "Qwen/Qwen3-1.7B",
            1024,
            "<s>",
            "",
            "QK-norm per head",
        ),
        Family(
            "llama",
            ("llama",),
            "SmolLM2-135M-Instruct-Q4_1",
            None,
            "meta-llama/Llama-3.2-1B",
            2048,
            "",
            "<|begin_of_text|>",
            "nothing",
        ),
        Family(
            "olmo",
            ("olmo2",),
            "embedded-olmo",
            "olmo",
            "allenai/OLMo-2-0425-1B",
            1024,
            "<s>",
            "",
            "QK-norm over all heads at once",
        ),
        Family(
            "gemma",
            ("gemma3_text", "gemma3"),
            "embedded-gemma",
            "gemma",
            "google/gemma-3-1b-pt",
            1024,
            "<s>",
            "<bos>",
            "QK-norm per head, sliding windows",
        ),
    )
}

GEMMA_270M_LABEL = "gemma-3-270m-Q4_K_M"  # the real model, for those who accept its terms
GEMMA_270M_BEGINS = "<bos>"  # without it its loss rises from 3.63 to 4.60 and the sink goes
GEMMA_270M_LENGTH = 2048

# Architectures whose every release was trained with BOS first, whether or not a converted tokenizer says so.
BOS_ALWAYS = ("gemma", "gemma2", "gemma3", "gemma3_text")


def family_named(name: str) -> Family:
    """The record of that name; raises BadInput with the list of names."""
    if name not in FAMILIES:
        raise BadInput(
            f"unknown model {name!r}: expected one of {', '.join(FAMILIES)} (any other: give --checkpoint alone)"
        )
    return FAMILIES[name]


def family_of(model_type: str) -> str:
    """The family of an architecture; one outside the five is its own family, under transformers' name."""
    return next((name for name, family in FAMILIES.items() if model_type in family.model_types), model_type)
