#!/usr/bin/env python3
"""Writes small tokenizers of the SentencePiece kind (Llama 2, Mistral, Gemma) and what Hugging Face makes of texts with them and
with the demo model's, for tests/all/tokenizers.rs to compare.

    .venv/bin/python make_tokenizers.py        # packages: see make_goldens.py

The vocabularies are trained on the samples below: they are of no use but to show the pipeline (dummy prefix, byte fallback,
added tokens that take blanks with them, a template around the text).
"""

import json
import pathlib

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

HERE = pathlib.Path(__file__).resolve().parent
DEMO = HERE.parents[3] / "models" / "penstock-demo"
SAMPLES = [
    "",
    " ",
    "Hello",
    " Hello",
    "Hello  world ",
    "Hello, world! 123 \n\n\t x",
    "Übergrößenträger — naïve café “quoted”",
    "漢字とひらがな、カタカナ。한국어 中文字符",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 é 🇩🇪",
    "עברית العربية हिन्दी ไทย",
    "fn main() { println!(\"{}\", 'a'); } // ∀x∈ℝ",
    "a\r\nb\tc\u00a0d",
    "it's I'M we'll",
    "12345 3.14 1e10",
    "   leading and trailing   ",
    "▁ is not a blank",
    "<0x41>",
    "tab\there",
    "<s>Hello</s>",
    "x <mask> y",
    "a<tool>b <tool> c",
    "e\u0301 \u212b \ufb01",
]
CORPUS = [s for s in SAMPLES if s] * 4 + ["the quick brown fox jumps over the lazy dog " * 3]


def sentencepiece(prepend):
    """`prepend`: by the normalizer before every piece (Llama 2), by Metaspace before the text (newer conversions), or none (Gemma)."""
    tok = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    blank = decoders.Replace("▁", " ")
    if prepend == "normalizer":
        tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tok.decoder = decoders.Sequence([blank, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    elif prepend == "metaspace":
        tok.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
        tok.decoder = decoders.Sequence([blank, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        tok.normalizer = normalizers.Replace(" ", "▁")
        tok.decoder = decoders.Sequence([blank, decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    latin = [t for t in CORPUS if t.isascii()]
    tok.train_from_iterator(latin, trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False))
    # Bytes are tokens of the model, not marks to be found in text.
    spec = json.loads(tok.to_str())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if not t["content"].startswith("<0x")]
    tok = Tokenizer.from_str(json.dumps(spec))
    tok.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    tok.add_tokens([AddedToken("<tool>", rstrip=True, normalized=False, special=False)])
    tok.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tok.token_to_id("<s>"))]
    )
    return tok


def cases(tok):
    out = []
    for text in SAMPLES:
        ids = tok.encode(text).ids
        bare = tok.encode(text, add_special_tokens=False).ids
        out.append(
            {
                "text": text,
                "ids": ids,
                "bare": bare,
                "kept": tok.decode(bare, skip_special_tokens=False),
                "shown": tok.decode(ids, skip_special_tokens=True),
            }
        )
    return out


def main():
    for prepend in ("normalizer", "metaspace", "none"):
        tok = sentencepiece(prepend)
        path = HERE / "tokenizers" / f"sentencepiece-{prepend}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(json.loads(tok.to_str()), ensure_ascii=False, separators=(",", ":")) + "\n")
        write(f"sentencepiece-{prepend}", cases(tok))
    demo = PreTrainedTokenizerFast.from_pretrained(DEMO).backend_tokenizer
    write("penstock-demo", cases(demo))


def write(name, value):
    (HERE / "tokenizers" / f"{name}.cases.json").write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
