"""Voice commands for a home, in several languages, by topic: text that comes as a wheel.

The package home-assistant-intents (Apache-2.0) has templates that speakers of each language wrote,
such as "(turn|switch) on [the] lights in {area}", under intents that all languages share. Nothing
of that package is imported, its files are read.
"""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

from _data import Rows, inside

# related intents are one topic
TOPICS = {
    "timer": "Hass.*Timer.*",
    "media": "HassMedia.*|HassSetVolume.*",
    "light": "HassLightSet",
    "list": "Hass.*List.*",
    "temperature": "HassClimate.*",
    "question": "HassGetState",
    "on": "HassTurnOn",
    "off": "HassTurnOff",
    "robot": "HassVacuum.*|HassLawnMower.*",
}
# each home has rooms and devices of its own, so the package has no words for them
WORDS = {
    "en": {
        "area": "kitchen|bathroom|bedroom|garage|garden|living room|office|hall",
        "floor": "basement|ground floor|first floor|attic",
        "item": "milk|bread|apples|coffee|soap|batteries",
        "text": "dinner is ready|the bus leaves at nine|I will be late",
        "name": "lamp|fan|heater|tower|printer|speaker",
        "zone": "school|work|home",
    },
    "de": {
        "area": "Küche|Bad|Schlafzimmer|Garage|Garten|Wohnzimmer|Büro|Flur",
        "floor": "Keller|Erdgeschoss|erster Stock|Dachboden",
        "item": "Milch|Brot|Äpfel|Kaffee|Seife|Batterien",
        "text": "das Essen ist fertig|der Bus fährt um neun|ich komme später",
        "name": "Lampe|Ventilator|Heizung|Turm|Drucker|Lautsprecher",
        "zone": "Schule|Arbeit|Hause",
    },
    "es": {
        "area": "cocina|baño|dormitorio|garaje|jardín|salón|oficina|pasillo",
        "floor": "sótano|planta baja|primer piso|desván",
        "item": "leche|pan|manzanas|café|jabón|pilas",
        "text": "la cena está lista|el autobús sale a las nueve|llegaré tarde",
        "name": "lámpara|ventilador|calefactor|torre|impresora|altavoz",
        "zone": "escuela|trabajo|casa",
    },
}
KINDS = {
    "todo_list_item": "item",
    "shopping_list_item": "item",
    "search_query": "text",
    "message": "text",
    "timer_command": "text",
    "timer_name": "name",
}


def load_commands(language: str, rows: int, part: str, seed: int) -> Rows:
    """Sentences of a language, as many of each topic; the group of a sentence is its template.

    Args:
        language: "en", "de" or "es".
        rows: how many.
        part: "train" or "test"; a third of the templates is for the test.
        seed: of the draw.

    Raises:
        DataError: the package is not installed.
    """
    draw = random.Random(f"{language} {part} {seed}")
    grammar = Grammar(language, draw)
    pools = [_part(pool, part) for pool in grammar.templates()]
    made = Rows([], [], [])
    for row in range(rows):
        label = row % len(pools)
        template = draw.choice(pools[label])
        made.texts.append(grammar.sentence(template))
        made.labels.append(label)
        made.groups.append(template)
    return made


class Grammar:
    """The templates of a language.

    "[a]" is optional, "(a|b)" one of the two, "(a;b)" both in any order, "<rule>" another template,
    and "{list}" one of its values.
    """

    def __init__(self, language: str, draw: random.Random) -> None:
        """Read the file of a language.

        Args:
            language: "en", "de" or "es".
            draw: makes each choice.
        """
        self.data, self.words, self.draw = _read(language), WORDS[language], draw

    def templates(self) -> list[list[str]]:
        """Those of each topic, without repetition."""
        found: list[list[str]] = []
        for pattern in TOPICS.values():
            intents = [v for k, v in self.data["intents"].items() if re.fullmatch(pattern, k)]
            found.append(sorted({s for i in intents for b in i["data"] for s in b["sentences"]}))
        return found

    def sentence(self, template: str) -> str:
        """One of the sentences that a template stands for."""
        return " ".join(self.read(template)[0].split())

    def read(self, text: str) -> tuple[str, str]:
        """What the text stands for, up to its end or a closing bracket, and what follows that."""
        options, joined = [""], False
        while text and text[0] not in ")]":
            first, text = text[0], text[1:]
            piece = first
            if first in "|;":
                joined |= first == ";"
                options.append("")
                continue
            if first in "([":
                piece, text = self.read(text)
                text = text[1:]
                if first == "[" and self.draw.random() < 0.5:
                    piece = ""
            elif first == "<":
                name, _, text = text.partition(">")
                piece = self.read(self.data["expansion_rules"][name])[0]
            elif first == "{":
                name, _, text = text.partition("}")
                piece = self.value(name.partition(":")[0])
            options[-1] += piece
        if joined:
            self.draw.shuffle(options)
            return " ".join(options), text
        return self.draw.choice(options), text

    def value(self, name: str) -> str:
        """One value of a list."""
        known = self.data["lists"].get(name, {})
        if "range" in known:
            limits = known["range"]
            numbers = range(limits["from"], limits["to"] + 1, limits.get("step", 1))
            return str(self.draw.choice(numbers))
        if "values" in known:
            value = self.draw.choice(known["values"])
            return self.read(value if isinstance(value, str) else value["in"])[0]
        return self.draw.choice(self.words[KINDS.get(name, name)].split("|"))


def _part(templates: list[str], part: str) -> list[str]:
    shuffled = random.Random(0).sample(templates, len(templates))
    third = len(templates) // 3
    return shuffled[:third] if part == "test" else shuffled[third:]


@cache
def _read(language: str) -> Any:
    path = inside("home_assistant_intents", f"data/{language}.json")
    return json.loads(path.read_text("utf-8"))
