"""What both evaluations share: the prompts of each skill, how long an answer may be, and the report.

The prompts come from the corpus with a seed that training never uses: the same distribution, not the same documents (skills with
few possible prompts, such as greetings and capitals, do repeat prompts seen in training). In a conversation of several turns
the earlier answers are given, the last one is checked.
"""

import json
import random

from corpus import EVALUATED_TOO, SKILLS

# Tokens that an answer may have; 40 where none is given.
LIMITS = {
    "story": 130,
    "plain_story": 110,
    "count_to": 110,
    "copy_words": 60,
    "tool_one": 70,
    "tool_many": 70,
    "plain_count": 48,
    "think_add": 64,
}


def items(seed, prompts, only=""):
    """Yields (skill, its items); `only`: names with commas between, or empty for all."""
    for name, make in {**SKILLS, **EVALUATED_TOO}.items():
        if only and name not in only.split(","):
            continue
        generator = random.Random(f"{seed}-{name}")
        yield name, [make(generator) for _ in range(prompts)]


def limit(skill):
    """Tokens that an answer of `skill` may have."""
    return LIMITS.get(skill, 40)


class Report:
    """Accuracy per skill, printed as it comes."""

    def __init__(self, seed, prompts, show=0):
        self.seed, self.prompts, self.show = seed, prompts, show
        self.rows = {}

    def add(self, skill, items, texts, prompt_tokens_mean):
        """Judges the answers of one skill."""
        good = [item.check(text) for item, text in zip(items, texts, strict=True)]
        accuracy = round(sum(good) / len(good), 4)
        self.rows[skill] = {
            "accuracy": accuracy,
            "prompts": len(good),
            "prompt_tokens_mean": round(prompt_tokens_mean),
        }
        print(f"{skill:16s} {100 * accuracy:5.1f} %   mean prompt {prompt_tokens_mean:.0f} tokens", flush=True)
        wrong = [(item, text) for item, text, right in zip(items, texts, good, strict=True) if not right]
        for item, text in wrong[: self.show]:
            want = item.messages[-1].get("content") if item.messages else None
            print("    ", json.dumps({"got": text, "want": want}, ensure_ascii=False))

    def finish(self, path=""):
        """Prints the mean and writes the report to `path`; returns the mean accuracy."""
        mean = sum(row["accuracy"] for row in self.rows.values()) / len(self.rows)
        over = sum(row["accuracy"] >= 0.9 for row in self.rows.values())
        print(f"mean {100 * mean:.1f} %, {over} of {len(self.rows)} skills at 90 % or more")
        if path:
            report = {
                "seed": self.seed,
                "prompts_per_skill": self.prompts,
                "mean_accuracy": round(mean, 4),
                "skills_at_90": over,
                "skills": self.rows,
            }
            with open(path, "w") as file:
                json.dump(report, file, indent=2)
        return mean
