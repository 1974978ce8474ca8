#!/usr/bin/env python3
"""Vectors and scores of small random encoders, from sentence-transformers and Hugging Face transformers.

    python make_encoders.py [--only NAME] [--out tests/goldens/encoders]

One file per case, with the weights of `make_goldens.py`. States are transformers' in float32 with eager attention, of sequences of
token ids; vectors and scores are sentence-transformers', of texts, with the files that it wrote. Beside them: how far the
same runs in bfloat16 are from those in float32.
"""

import argparse
import json
import os
import tempfile

import numpy as np
import sentence_transformers
import tokenizers
import torch
import transformers
from make_goldens import DTYPE, uniform, weights
from sentence_transformers import CrossEncoder, SentenceTransformer, models
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

TEXTS = [
    "The cat sat on the mat.",
    "A dog barked!",
    "Prices rose in March, and fell again in May.",
    "Größe und Maß; naïve café",
    "x",
    "日本語 and words",
    "word " * 25,
]
PAIRS = [
    ("Where do cats sleep?", "Cats sleep in the sun."),
    ("Where do cats sleep?", "The stock market fell."),
    ("Where do cats sleep?", "Dogs like to run, and run."),
    ("cat", "x"),
    ("A dog barked!", "word " * 40),
]
LENGTHS = (1, 2, 7, 31, 32, 33, 64, 100)
WORDS = "the cat sat on mat a dog barked prices rose in march and fell again may where do sleep sun stock market word".split()


def letters():
    return sorted(set("".join(TEXTS + [part for pair in PAIRS for part in pair]).replace(" ", "")))


def wordpiece():
    """BERT's tokenizer, uncased."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made = pieces_of_words(names, "[UNK]")
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]")
    return made, dict(names, model_input_names=["input_ids", "token_type_ids", "attention_mask"])


def mpnet_wordpiece():
    """MPNet's tokenizer: BERT's pieces with RoBERTa's special tokens."""
    made = pieces_of_words(["<s>", "<pad>", "</s>", "<unk>", "[UNK]", "<mask>"], "[UNK]")
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return made, dict(ROBERTA, unk_token="[UNK]", model_input_names=["input_ids", "attention_mask"])


def pieces_of_words(names, unknown):
    plain = sorted({c for c in normalizers.BertNormalizer().normalize_str("".join(letters())) if c != " "})
    pieces = [*plain, *("##" + c for c in plain), *(w for w in WORDS if len(w) > 1), "##s", "##ed"]
    vocab = {name: i for i, name in enumerate([*names, *dict.fromkeys(pieces)])}
    made = Tokenizer(tokenizers.models.WordPiece(vocab, unk_token=unknown))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return made


ROBERTA = dict(cls_token="<s>", sep_token="</s>", pad_token="<pad>", unk_token="<unk>", mask_token="<mask>")


def sentencepiece():
    """XLM-R's tokenizer."""
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -3.0)]
    pieces += [(c, -6.0 - i / 100) for i, c in enumerate(letters())]
    pieces += [("▁" + w, -4.0 - i / 50) for i, w in enumerate(WORDS)] + [("<mask>", 0.0)]
    made = Tokenizer(tokenizers.models.Unigram(pieces, unk_id=3))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")])
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    made.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return made, ROBERTA


def bytelevel():
    """RoBERTa's tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<s>", "<pad>", "</s>", "<unk>"]
    vocab = {name: i for i, name in enumerate([*names, *alphabet, "Ġt", "he", "Ġthe", "<mask>"])}
    made = Tokenizer(tokenizers.models.BPE(vocab, [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return made, ROBERTA


def modern_bytelevel():
    """ModernBERT's tokenizer. It gives the second text a type, which the model does not have."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    vocab = {name: i for i, name in enumerate([*names, *alphabet, "Ġt", "he", "Ġthe"])}
    made = Tokenizer(tokenizers.models.BPE(vocab, [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = dict(cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]")
    return made, dict(names, model_input_names=["input_ids", "attention_mask"])


def base(name, kind, **kw):
    out = dict(
        architectures=[name],
        model_type=kind,
        hidden_size=96,
        intermediate_size=141,
        num_hidden_layers=3,
        num_attention_heads=6,
        max_position_embeddings=160,
        hidden_act="gelu",
        layer_norm_eps=1e-12,
        type_vocab_size=2,
        pad_token_id=0,
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
    )
    return {**out, **kw}


def bert(name="BertModel", **kw):
    return base(name, "bert", **kw)


def roberta(name="RobertaModel", **kw):
    kind = {"XLM": "xlm-roberta", "Cam": "camembert"}.get(name[:3], "roberta")
    own = dict(pad_token_id=1, bos_token_id=0, eos_token_id=2, type_vocab_size=1, layer_norm_eps=1e-5)
    return base(name, kind, **{**own, "max_position_embeddings": 162, **kw})


def mpnet(name="MPNetModel", **kw):
    own = dict(pad_token_id=1, bos_token_id=0, eos_token_id=2, max_position_embeddings=162)
    config = base(name, "mpnet", **{**own, **kw})
    del config["type_vocab_size"]
    return config


def modern(name="ModernBertModel", **kw):
    out = dict(
        architectures=[name],
        model_type="modernbert",
        hidden_size=96,
        intermediate_size=141,
        num_hidden_layers=5,
        num_attention_heads=6,
        max_position_embeddings=160,
        local_attention=24,
        pad_token_id=3,
        cls_token_id=1,
        bos_token_id=1,
        sep_token_id=2,
        eos_token_id=2,
    )
    return {**out, **kw}


def distilbert(name="DistilBertModel", **kw):
    out = dict(
        architectures=[name],
        model_type="distilbert",
        dim=96,
        hidden_dim=141,
        n_layers=3,
        n_heads=6,
        max_position_embeddings=160,
        activation="gelu",
        pad_token_id=0,
        sinusoidal_pos_embds=False,
    )
    return {**out, **kw}


def nomic(**kw):
    """Both spellings, as published configs have them: transformers' and the makers'."""
    out = dict(
        hidden_act="silu",
        rope_parameters=dict(rope_type="default", rope_theta=1000.0),
        activation_function="swiglu",
        n_positions=8192,
        max_trained_positions=160,
        rotary_emb_base=1000,
        rotary_emb_fraction=1.0,
        rotary_emb_interleaved=False,
        rotary_emb_scale_base=None,
        rotary_scaling_factor=None,
        prenorm=False,
        causal=False,
        use_rms_norm=False,
        qkv_proj_bias=False,
        mlp_fc1_bias=False,
        mlp_fc2_bias=False,
    )
    config = base("NomicBertModel", "nomic_bert", **{**out, **kw})
    for ours, theirs in MAKERS.items():
        config[theirs] = config[ours]
    return config


MAKERS = dict(
    hidden_size="n_embd",
    intermediate_size="n_inner",
    num_hidden_layers="n_layer",
    num_attention_heads="n_head",
    layer_norm_eps="layer_norm_epsilon",
)
# Names of NomicBERT's tensors in transformers, and in checkpoints.
NOMIC = {
    "embeddings.LayerNorm": "emb_ln",
    "self_attn.o_proj": "attn.out_proj",
    "mlp.up_proj": "mlp.fc11",
    "mlp.gate_proj": "mlp.fc12",
    "mlp.down_proj": "mlp.fc2",
    "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
}


def stored_parts(kind, name, shape):
    """Name and shape of the tensor of a checkpoint that has a parameter, and its rows there."""
    if kind != "nomic_bert":
        return name, shape, slice(None)
    name = name.replace("layers.", "encoder.layers.", 1) if name.startswith("layers.") else name
    for ours, theirs in NOMIC.items():
        name = name.replace(ours, theirs)
    for at, part in enumerate("qkv"):
        if name.endswith(f"self_attn.{part}_proj.weight"):
            rows, columns = shape
            return (
                name.replace(f"self_attn.{part}_proj", "attn.Wqkv"),
                (3 * rows, columns),
                slice(at * rows, (at + 1) * rows),
            )
    return name, shape, slice(None)


ONE = dict(id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})
# name: (config, dtype, tokenizer, pooling and whether it is scaled, or None for a reranker)
CASES = {
    "bert-cls": (bert(), "f32", wordpiece, ("cls", True)),
    "bert-mean": (
        bert(hidden_size=66, num_attention_heads=3, num_hidden_layers=2, intermediate_size=99, hidden_act="gelu_new"),
        "bf16",
        wordpiece,
        ("mean", True),
    ),
    "bert-long": (
        bert(
            hidden_size=64,
            num_attention_heads=2,
            num_hidden_layers=2,
            intermediate_size=96,
            max_position_embeddings=700,
        ),
        "f16",
        wordpiece,
        ("mean", False),
    ),
    "roberta-mean": (roberta(), "f32", bytelevel, ("mean", True)),
    "xlmr-cls": (roberta("XLMRobertaModel", num_hidden_layers=2), "f32", sentencepiece, ("cls", True)),
    "camembert-mean": (roberta("CamembertModel", num_hidden_layers=2), "bf16", sentencepiece, ("mean", True)),
    "bert-masked": (bert("BertForMaskedLM", num_hidden_layers=2), "f32", wordpiece, ("mean", True)),
    "xlmr-masked": (roberta("XLMRobertaForMaskedLM", num_hidden_layers=2), "f32", sentencepiece, ("cls", True)),
    "modern-cls": (
        modern(
            layer_types=[f"{kind}_attention" for kind in ("full", "sliding", "sliding", "full", "sliding")],
            rope_parameters=dict(
                full_attention=dict(rope_type="default", rope_theta=160000.0),
                sliding_attention=dict(rope_type="default", rope_theta=1000.0),
            ),
        ),
        "f32",
        modern_bytelevel,
        ("cls", True),
    ),
    # The older spelling, every bias, and an odd window.
    "modern-mean": (
        modern(
            hidden_size=66,
            num_attention_heads=3,
            intermediate_size=99,
            num_hidden_layers=3,
            global_attn_every_n_layers=2,
            global_rope_theta=80000.0,
            local_rope_theta=10000.0,
            local_attention=7,
            hidden_activation="gelu_pytorch_tanh",
            attention_bias=True,
            mlp_bias=True,
            norm_bias=True,
        ),
        "bf16",
        modern_bytelevel,
        ("mean", True),
    ),
    # Longer than a split of attention; the window of the published models.
    "modern-masked": (
        modern(
            "ModernBertForMaskedLM",
            hidden_size=64,
            num_attention_heads=2,
            intermediate_size=96,
            num_hidden_layers=4,
            max_position_embeddings=700,
            local_attention=128,
        ),
        "f16",
        modern_bytelevel,
        ("mean", False),
    ),
    "modern-rank": (
        modern("ModernBertForSequenceClassification", max_position_embeddings=256, **ONE),
        "f32",
        modern_bytelevel,
        None,
    ),
    "modern-rank-mean": (
        modern(
            "ModernBertForSequenceClassification",
            num_hidden_layers=2,
            max_position_embeddings=256,
            classifier_pooling="mean",
            classifier_bias=True,
            norm_bias=True,
            **ONE,
        ),
        "bf16",
        modern_bytelevel,
        None,
    ),
    "mpnet-mean": (mpnet(), "f32", mpnet_wordpiece, ("mean", True)),
    # Longer than the distances that have buckets of their own.
    "mpnet-long": (
        mpnet(
            hidden_size=64,
            num_attention_heads=2,
            num_hidden_layers=2,
            intermediate_size=96,
            max_position_embeddings=514,
        ),
        "bf16",
        mpnet_wordpiece,
        ("cls", True),
    ),
    "mpnet-masked": (mpnet("MPNetForMaskedLM", num_hidden_layers=2), "f16", mpnet_wordpiece, ("mean", False)),
    "mpnet-rank": (mpnet("MPNetForSequenceClassification", **ONE), "f32", mpnet_wordpiece, None),
    "distilbert-mean": (distilbert(), "f32", wordpiece, ("mean", True)),
    "distilbert-masked": (
        distilbert("DistilBertForMaskedLM", n_layers=2, dim=66, n_heads=3, hidden_dim=99),
        "bf16",
        wordpiece,
        ("cls", True),
    ),
    "nomic-mean": (nomic(), "f32", wordpiece, ("mean", True)),
    # Longer than a split of attention, with another base.
    "nomic-long": (
        nomic(
            hidden_size=64,
            num_attention_heads=2,
            num_hidden_layers=2,
            intermediate_size=96,
            max_position_embeddings=700,
            rope_parameters=dict(rope_type="default", rope_theta=5000.0),
        ),
        "bf16",
        wordpiece,
        ("mean", False),
    ),
    "bert-rank": (bert("BertForSequenceClassification", **ONE), "f32", wordpiece, None),
    "bert-rank-plain": (
        bert(
            "BertForSequenceClassification",
            num_hidden_layers=2,
            sentence_transformers=dict(activation_fn="torch.nn.modules.linear.Identity", version="4.0.1"),
            **ONE,
        ),
        "bf16",
        wordpiece,
        None,
    ),
    "xlmr-rank": (roberta("XLMRobertaForSequenceClassification", **ONE), "f32", sentencepiece, None),
}


def build(config, dtype, seed, stored):
    """The model in `dtype`, its weights rounded to `stored` first."""
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(config, file)
        loaded = AutoConfig.from_pretrained(folder)
    name = config["architectures"][0]
    auto = AutoModelForMaskedLM if "Masked" in name else AutoModel
    auto = AutoModelForSequenceClassification if "Sequence" in name else auto
    model = auto.from_config(loaded, dtype=dtype, attn_implementation="eager").eval()
    # An embedding that is tied to a head has the encoder's name in a checkpoint.
    named = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        if id(value) not in named or name.startswith(model.base_model_prefix + "."):
            named[id(value)] = (name, value)
    tensors = []
    with torch.no_grad():
        for parameter, value in named.values():
            name, shape, rows = stored_parts(config["model_type"], parameter, tuple(value.shape))
            value.copy_(torch.from_numpy(weights(seed, name, shape)[rows]).to(DTYPE[stored]).to(dtype))
            if [name, list(shape)] not in tensors:
                tensors.append([name, list(shape)])
    return model, tensors


@torch.no_grad()
def states(model, tokens):
    """States of all tokens of a sequence."""
    return model.base_model(torch.tensor([tokens])).last_hidden_state[0].float()


@torch.no_grad()
def logit(model, tokens, second):
    types = [int(second > 0 and at >= second) for at in range(len(tokens))]
    kw = dict(token_type_ids=torch.tensor([types])) if getattr(model.config, "type_vocab_size", 1) > 1 else {}
    return model(torch.tensor([tokens]), **kw).logits[0, 0].item()


def distance(errors):
    errors = torch.cat([error.reshape(-1) for error in errors])
    return dict(mean=round(errors.mean().item(), 7), max=round(errors.max().item(), 7))


def numbers(values, digits=6):
    return [round(v, digits) for v in values.tolist()]


def files_of(folder):
    """Files of the folder that say what the model is, without its weights."""
    found = {}
    for place, _, names in os.walk(folder):
        for name in sorted(names):
            if name.endswith(".json"):
                path = os.path.join(place, name)
                with open(path) as file:
                    found[os.path.relpath(path, folder)] = json.load(file)
    return found


def embedder(config, half, full, special, made, pooling, sequences):
    scaled = torch.nn.functional.normalize
    rows, errors = [], []
    for tokens in sequences:
        want, got = states(full, tokens), states(half, tokens)
        for pooled in (lambda s: s[0], lambda s: s.mean(0)):
            errors.append((scaled(pooled(got), dim=0) - scaled(pooled(want), dim=0)).abs())
        rows.append(dict(first=numbers(want[0]), mean=numbers(want.mean(0))))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as saved:
        full.save_pretrained(folder)
        PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)
        mode, is_scaled = pooling
        modules = [models.Transformer(folder), models.Pooling(full.config.hidden_size, pooling_mode=mode)]
        st = SentenceTransformer(modules=modules + [models.Normalize()] * is_scaled, device="cpu")
        st.save(saved)
        files = files_of(saved)
        # sentence-transformers saves the bare encoder of a model with another head.
        files["config.json"]["architectures"] = config["architectures"]
        vectors = st.encode(TEXTS)
    return dict(
        lengths=[len(tokens) for tokens in sequences],
        states=rows,
        bf16=distance(errors),
        pooling=mode,
        texts=TEXTS,
        ids=[made.encode(text).ids for text in TEXTS],
        vectors=[numbers(torch.from_numpy(np.array(vector))) for vector in vectors],
        files=files,
    )


def reranker(config, half, full, special, made, sequences):
    # Pairs of any cut of the sequences; the first is one text.
    cuts = [
        (tokens, 0 if config.get("type_vocab_size", 1) == 1 else min(at * len(tokens) // 4, len(tokens) - 1))
        for tokens in sequences
        for at in (0, 1, 2, 3)
    ]
    logits = [(logit(full, *cut), logit(half, *cut)) for cut in cuts]
    with tempfile.TemporaryDirectory() as folder:
        full.save_pretrained(folder)
        PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)
        cross = CrossEncoder(folder, device="cpu")
        scores = cross.predict(PAIRS)
        raw = cross.predict(PAIRS, activation_fn=torch.nn.Identity())
        files = files_of(folder)
    encoded = [made.encode(*pair) for pair in PAIRS]
    for encoding, got in zip(encoded, raw, strict=True):
        # sentence-transformers was given the types of BERT's tokens.
        second = encoding.type_ids.index(1) if 1 in encoding.type_ids else 0
        assert abs(logit(full, encoding.ids, second) - got) < 1e-4
    return dict(
        lengths=[len(tokens) for tokens, _ in cuts],
        seconds=[second for _, second in cuts],
        logits=[round(full, 6) for full, _ in logits],
        bf16=distance([torch.tensor(abs(half - full)) for full, half in logits]),
        pairs=PAIRS,
        ids=[encoding.ids for encoding in encoded],
        types=[encoding.type_ids for encoding in encoded],
        scores=numbers(torch.from_numpy(np.array(scores))),
        raw=numbers(torch.from_numpy(np.array(raw))),
        files=files,
    )


def make(name, config, stored, tokenizer, pooling):
    made, special = tokenizer()
    vocab = made.get_vocab_size() + 7
    first = (
        config["pad_token_id"] + 1 if config["model_type"] in ("roberta", "xlm-roberta", "camembert", "mpnet") else 0
    )
    length = config["max_position_embeddings"] - first
    config = dict(config, vocab_size=vocab)
    seed = 1
    # No token of the sequences is special.
    tokens = [5 + int(t) for t in (uniform(seed, "tokens", (length,)) + 1) / 2 * (vocab - 5)]
    full, tensors = build(config, torch.float32, seed, stored)
    half, _ = build(config, torch.bfloat16, seed, stored)
    sequences = [tokens[:count] for count in (*LENGTHS, length)]
    if pooling:
        result = embedder(config, half, full, special, made, pooling, sequences)
    else:
        result = reranker(config, half, full, special, made, sequences)
    print(f"{name:18s} {result['bf16']}")
    versions = dict(
        transformers=transformers.__version__,
        torch=torch.__version__,
        sentence_transformers=sentence_transformers.__version__,
    )
    return dict(case=name, **versions, config=config, seed=seed, dtype=stored, tensors=tensors, tokens=tokens, **result)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "encoders"))
    ap.add_argument("--only", default="", help="one case")
    a = ap.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    os.makedirs(a.out, exist_ok=True)
    for name, case in CASES.items():
        if a.only in ("", name):
            with open(os.path.join(a.out, f"{name}.json"), "w") as file:
                json.dump(make(name, *case), file, separators=(",", ":"), ensure_ascii=False)
                file.write("\n")


if __name__ == "__main__":
    main()
