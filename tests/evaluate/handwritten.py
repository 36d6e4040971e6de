"""A few rows of every data set, in its own columns, written for these tests; as files and for lm-eval's own tasks."""

from __future__ import annotations

import json
from pathlib import Path

FACTS = [
    ("Which of these melts in the sun?", "an ice cube", "a granite block", "a glass marble", "an iron key"),
    ("Where do fish live?", "in water", "in trees", "under roofs", "on the moon"),
    ("What do bees make?", "honey", "milk", "bread", "silver"),
    ("Which season is the coldest in Norway?", "winter", "summer", "spring", "autumn"),
    ("What does a thermometer measure?", "temperature", "weight", "loudness", "distance in miles"),
    ("Which animal barks?", "a dog", "a trout", "an eagle", "a beetle"),
    ("What is needed to light a candle?", "a flame", "a spoon of salt", "a mirror", "some naïve hope"),
    ("Which planet do we live on?", "Earth", "Mars", "Venus", "Neptune"),
    ("What falls from clouds?", "rain", "sand", "copper", "feathers"),
    ("Who repairs teeth?", "a dentist", "a baker", "a pilot", "a tailor"),
    ("What do plants take from the air?", "carbon dioxide", "helium", "neon", "argon gas only"),
    ("Which of these is a fruit?", "a pear", "a carrot", "a brick", "a violin"),
]
LETTERS = ["A", "B", "C", "D"]


def _choices(number: int) -> tuple[list[str], int]:
    right, *wrong = FACTS[number][1:]
    place = (number * 3 + 1) % 4
    return [*wrong[:place], right, *wrong[place:]], place


def _arc(number: int) -> dict:
    choices, place = _choices(number)
    # Some of ARC's questions have numbered choices, and three or five of them.
    labels = LETTERS if number % 3 else ["1", "2", "3", "4"]
    return {"question": FACTS[number][0], "choices": {"text": choices, "label": labels}, "answerKey": labels[place]}


def _openbookqa(number: int) -> dict:
    row = _arc(number)
    return {"question_stem": row["question"].rstrip("?"), "choices": row["choices"], "answerKey": row["answerKey"]}


def _boolq(number: int) -> dict:
    question, right, wrong, *_ = FACTS[number]
    passage = f"Long ago people asked: {question} Today we know that it is {right}."
    return {"question": f"is it {(wrong, right)[number % 2]}", "passage": passage, "label": number % 2}


def _piqa(number: int) -> dict:
    question, right, wrong, *_ = FACTS[number]
    solutions = (right, wrong) if number % 2 == 0 else (wrong, right)
    return {"goal": question, "sol1": solutions[0], "sol2": f"{solutions[1]} - the usual way", "label": number % 2}


def _mmlu(number: int) -> dict:
    choices, place = _choices(number)
    subject = ("high_school_biology", "astronomy")[number % 2]
    return {"subject": subject, "question": f" {FACTS[number][0]} ", "choices": choices, "answer": place}


def _winogrande(number: int) -> dict:
    one, other = ("Ann", "Bob") if number % 2 else ("the cup", "the box")
    sentence = f"{one} did not fit {other} in round {number} because _ was too small, said everybody."
    return {"sentence": sentence, "option1": one, "option2": other, "answer": "12"[number % 2]}


def _hellaswag(number: int) -> dict:
    choices, place = _choices(number)
    return {
        "activity_label": "Answering",
        "ctx_a": f"A man stands up [title] slowly. He hears: {FACTS[number][0]}",
        "ctx_b": "he  answers" if number % 2 else "",
        "endings": [f"{choice} [step] and sits  down." for choice in choices],
        "label": str(place),
    }


def _gsm8k(number: int) -> dict:
    a, b = 3 + number, 17 * number + 2
    return {
        "question": f"Mara has {a} shells and finds {b} more. How many shells does she have?",
        "answer": f"Mara has {a}+{b} = <<{a}+{b}={a + b}>>{a + b} shells.\n#### {a + b:,}",
    }


COPA = [
    ("The glass broke.", "It fell on the floor.", "It was washed by hand.", "cause", 0),
    ("The boy was hungry.", "He read a book.", "He made a sandwich.", "effect", 1),
    ("My roof leaked.", "It had been repaired.", "A storm took some tiles.", "cause", 1),
    ("The dog saw a cat.", "It ran after the cat.", "It fell asleep.", "effect", 0),
    ("The shop closed early.", "The owner was ill.", "The owner hired a clerk.", "cause", 0),
    ("I missed the bus.", "I arrived late.", "I bought an umbrella.", "effect", 0),
    ("The soup was cold. ", "The stove was on.", "The stove was off.", "cause", 1),
    ("She watered the plant.", "It withered.", "It grew.", "effect", 1),
    ("The street was wet.", "It had rained.", "It was dark.", "cause", 0),
    ("He forgot his key.", "He could not get in.", "He locked the door.", "effect", 0),
    ("The crowd cheered.", "The team scored.", "The team left.", "cause", 0),
    ("The ice melted.", "The lake froze.", "The floor got wet.", "effect", 1),
]
RTE = [
    ("Oslo is the capital of Norway.", "Norway's capital is Oslo.", 0),
    ("The museum opened in 1902.", "The museum was opened last year.", 1),
    ("Ann sold her house to Bob.", "Bob bought a house.", 0),
    ("Some birds cannot fly.", "No bird can fly.", 1),
    ("The match ended without goals.", "Nobody scored in the match.", 0),
    ("The train leaves at nine.", "The train leaves at eight.", 1),
    ("Every pupil passed the exam.", "The pupils passed the exam.", 0),
    ("He likes tea.", "He likes coffee better than tea.", 1),
    ("The bridge was closed for repairs.", "The bridge was being repaired.", 0),
    ("Copper conducts electricity.", "Copper does not conduct electricity.", 1),
    ("Mia is older than Leo.", "Leo is younger than Mia.", 0),
    ("The river flooded the town in May.", "The town has never been flooded.", 1),
]


def _copa(number: int) -> dict:
    return dict(zip(("premise", "choice1", "choice2", "question", "label"), COPA[number], strict=True))


def _rte(number: int) -> dict:
    return dict(zip(("sentence1", "sentence2", "label"), RTE[number], strict=True))


MAKERS = {
    "arc_easy": _arc,
    "arc_challenge": _arc,
    "boolq": _boolq,
    "copa": _copa,
    "mmlu": _mmlu,
    "openbookqa": _openbookqa,
    "piqa": _piqa,
    "rte": _rte,
    "winogrande": _winogrande,
    "hellaswag": _hellaswag,
    "gsm8k": _gsm8k,
}
NINE = ("arc_challenge", "arc_easy", "boolq", "copa", "mmlu", "openbookqa", "piqa", "rte", "winogrande")
SPLITS = {
    **dict.fromkeys(("arc_easy", "arc_challenge", "openbookqa", "gsm8k"), ("test", "train")),
    **dict.fromkeys(("boolq", "copa", "piqa", "rte", "winogrande", "hellaswag"), ("validation", "train")),
    "mmlu": ("test", "dev"),
}
ASKED = 5
PAGES = (
    ' = One page = \n\n Mara @-@ Lee said , " it is 1 @,@ 000 m " . \n = = A part = = \n ( so )  \'s N \n'
    " = Two = \n Other words .\n"
)


AXES = {"mathematics": True, "code": True, "chat": False, "sql": False}


def fidelity_rows(per_axis: int = 8) -> list[dict]:
    """Short questions with fixed answers on four axes, two of them covered."""
    return [
        {
            "axis": axis,
            "covered": covered,
            "context": f"{axis}: {question}\n",
            "continuation": f"It is {right}, of course.",
        }
        for axis, covered in AXES.items()
        for question, right, *_ in FACTS[:per_axis]
    ]


def rows(task: str) -> dict[str, list[dict]]:
    """Rows of the asked split and of the one that examples are drawn from; MMLU's have five examples per subject."""
    asked, pool = SPLITS[task]
    maker = MAKERS[task]
    numbers = range(12) if task == "mmlu" else range(ASKED, 12)
    return {asked: [maker(number) for number in range(ASKED)], pool: [maker(number) for number in numbers]}


def write(folder: Path) -> Path:
    """All of it as a folder of data files."""
    folder.mkdir(parents=True, exist_ok=True)
    for task in MAKERS:
        asked, pool = rows(task).items()
        if task == "mmlu":
            subjects = sorted({row["subject"] for row in pool[1]})
            grouped = {
                subject: {
                    split: [
                        {k: v for k, v in row.items() if k != "subject"} for row in own if row["subject"] == subject
                    ]
                    for split, own in (asked, pool)
                }
                for subject in subjects
            }
            (folder / "mmlu.json").write_text(json.dumps(grouped), encoding="utf-8")
            continue
        for name, own in ((task, asked[1]), (f"{task}-{pool[0]}", pool[1])):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own), encoding="utf-8")
    fidelity = "".join(json.dumps(row) + "\n" for row in fidelity_rows())
    (folder / "fidelity.jsonl").write_text(fidelity, encoding="utf-8")
    (folder / "wikitext2-test.txt").write_text(PAGES, encoding="utf-8")
    (folder / "wikitext2-valid.txt").write_text("Some words stand here.\n" * 400, encoding="utf-8")
    return folder
