"""Counting, sorting, reversing, continuing."""

from .items import qa
from .words import ANIMALS, COLORS, DAYS, FOODS, MONTHS, NAMES, OBJECTS


def items_of(r, n, pool=None):
    """`n` different words of one list."""
    return r.sample(pool or r.choice([COLORS, ANIMALS, FOODS, OBJECTS, NAMES]), n)


def count_list(r):
    """How many items a list has."""
    n = r.randint(1, 9)
    t = items_of(r, n)
    return qa(
        r.choice(
            [
                "How many items are in this list: {}?",
                "Count the items: {}",
                "How many items are here? {}",
                "Count these items: {}",
                "How long is this list: {}?",
                "How many words: {}",
            ]
        ).format(", ".join(t)),
        f"There are {n} items." if n > 1 else "There is 1 item.",
    )


def sort_numbers(r):
    """Sort 2 to 6 numbers, sometimes downwards."""
    n = r.randint(2, 6)
    t = r.sample(range(r.choice([10, 30, 100])), n)
    down = r.random() < 0.25
    q = r.choice(
        ["Sort in descending order: {}", "Sort these numbers from high to low: {}", "Sort from largest to smallest: {}"]
        if down
        else [
            "Sort these numbers: {}",
            "Sort: {}",
            "Sort in ascending order: {}",
            "Put these numbers in order: {}",
            "Sort the list {}",
            "Sort from smallest to largest: {}",
            "Order these numbers: {}",
        ]
    )
    return qa(q.format(", ".join(map(str, t))), ", ".join(map(str, sorted(t, reverse=down))))


def sort_letters(r):
    """Sort 2 to 6 letters."""
    t = r.sample("abcdefghijklmnopqrstuvwxyz", r.randint(2, 6))
    return qa(
        r.choice(
            ["Sort these letters: {}", "Sort the letters {}", "Put these letters in alphabetical order: {}"]
        ).format(", ".join(t)),
        ", ".join(sorted(t)),
    )


def list_ends(r):
    """The first or the last item."""
    t = items_of(r, r.randint(2, 7))
    first = r.random() < 0.5
    w = "first" if first else "last"
    return qa(
        r.choice(
            [
                f"What is the {w} item in this list: {{}}?",
                f"Give me the {w} word of: {{}}",
                f"Which item comes {w}? {{}}",
                f"{w.capitalize()} item of {{}}",
            ]
        ).format(", ".join(t)),
        f"The {w} item is {t[0] if first else t[-1]}.",
    )


def reverse_list(r):
    """A list backwards."""
    t = items_of(r, r.randint(2, 5))
    return qa(
        r.choice(
            ["Reverse this list: {}", "Write this list backwards: {}", "Reverse: {}", "Reverse the order of {}"]
        ).format(", ".join(t)),
        ", ".join(reversed(t)),
    )


def min_max(r):
    """The largest or smallest of 2 to 5."""
    t = r.sample(range(r.choice([10, 100])), r.randint(2, 5))
    big = r.random() < 0.5
    w = r.choice(["largest", "biggest"] if big else ["smallest"])
    return qa(f"Which number is the {w}: {', '.join(map(str, t))}?", f"The {w} number is {max(t) if big else min(t)}.")


def sequence(r):
    """The next four of numbers, letters, days or months."""
    k = r.random()
    if k < 0.6:
        step, a, n = r.choice([1, 1, 1, 1, 2, 2, 5, 10]), r.randint(0, 60), r.randint(3, 6)
        t = [str(a + step * i) for i in range(n + 4)]
    elif k < 0.75:
        a, n = r.randint(0, 15), r.randint(3, 5)
        t = [chr(97 + a + i) for i in range(n + 4)]
    else:
        src, n = r.choice([DAYS, MONTHS]), 3
        a = r.randrange(len(src))
        t = [src[(a + i) % len(src)] for i in range(n + 4)]
    return qa(
        r.choice(
            [
                "Continue: {}",
                "Continue the sequence: {}",
                "What comes next? {}",
                "What comes next: {}, ...",
                "Continue this list: {}",
                "Next four: {}",
            ]
        ).format(", ".join(t[:n])),
        ", ".join(t[n : n + 4]),
    )


def count_to(r):
    """Count up or down."""
    a = r.choice([1, 1, 1, r.randint(0, 80)])
    b = a + r.choice([2, 4, 9, 9, r.randint(2, 25), 19])
    if r.random() < 0.2 and b < 40:
        return qa(
            r.choice(["Count down from {b} to {a}.", "Count backwards from {b} to {a}."]).format(a=a, b=b),
            ", ".join(str(i) for i in range(b, a - 1, -1)),
        )
    qs = [
        "Count from {a} to {b}.",
        "Count from {a} to {b}",
        "List the numbers from {a} to {b}.",
        "Write the numbers {a} to {b}.",
    ]
    if a == 1:
        qs += ["Count to {b}.", "Count to {b}", "Can you count to {b}?"]
    return qa(r.choice(qs).format(a=a, b=b), ", ".join(str(i) for i in range(a, b + 1)))
