"""Closed classes of English words that the readers of the picture ledger know, and the plural of nouns."""

from __future__ import annotations

from typing import Final


def word_set(text: str) -> frozenset[str]:
    """The words of a text, which has spaces between them."""
    return frozenset(text.split())


COLOURS: Final = word_set(
    "red green blue yellow orange purple violet pink brown black white grey gray cyan magenta turquoise teal gold golden silver beige "
    "navy crimson scarlet maroon olive lime indigo lavender cream tan"
)
SHADES = word_set("light dark pale deep bright")
NUMBER_WORDS: Final = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
NUMBERS: Final = {word: number for number, word in enumerate(NUMBER_WORDS)} | {
    "single": 1,
    "both": 2,
    "dozen": 12,
    "thirty": 30,
    "forty": 40,
    "fifty": 50,
    "sixty": 60,
    "seventy": 70,
    "eighty": 80,
    "ninety": 90,
}
INDEFINITE = word_set("a an another some several many few any")
DEFINITE = word_set("the this that these those its his her their my your our")
VAGUE = word_set("some several many few any")
ABSENT = frozenset(("no", "without"))
QUALITIES = word_set(
    "big small large little tiny huge tall short long wide narrow thick thin round old young new ancient modern wooden metal metallic "
    "plastic stone glass paper leather shiny matte rusty wet dry hot cold warm cool soft hard smooth rough furry fluffy striped spotted "
    "dotted empty full open closed broken happy sad angry sleepy cute beautiful pretty ugly elegant simple colorful colourful "
    "transparent bright dark light heavy fresh ripe sweet futuristic vintage rustic cozy cosy quiet busy crowded snowy rainy sunny "
    "foggy misty stormy cloudy starry"
)
MEDIA = word_set(
    "photo photograph picture image painting drawing sketch illustration portrait render rendering watercolor watercolour poster "
    "cartoon close-up closeup selfie shot view print etching sculpture"
)
RELATIONS: Final = {
    "to the left of": "left of", "on the left of": "left of", "on the left side of": "left of", "left of": "left of",
    "to the right of": "right of", "on the right of": "right of", "on the right side of": "right of", "right of": "right of",
    "on top of": "on", "in front of": "in front of", "next to": "next to", "close to": "next to", "inside of": "in",
    "above": "above", "over": "above", "below": "below", "under": "below", "beneath": "below", "underneath": "below",
    "beside": "next to", "near": "next to", "by": "next to", "behind": "behind", "inside": "in", "within": "in", "in": "in", "into": "in",
    "on": "on", "onto": "on", "upon": "on", "at": "at", "with": "with", "between": "between", "around": "around", "through": "through",
    "against": "against", "across": "across", "along": "along", "among": "among", "facing": "facing", "towards": "towards",
    "toward": "towards", "past": "past",
}  # fmt: skip
VERBS = {
    "sits": "sitting", "stands": "standing", "lies": "lying", "sleeps": "sleeping", "runs": "running", "jumps": "jumping",
    "walks": "walking", "flies": "flying", "plays": "playing", "holds": "holding", "wears": "wearing", "rides": "riding",
    "eats": "eating", "reads": "reading", "hangs": "hanging", "floats": "floating", "swims": "swimming", "drinks": "drinking",
    "carries": "carrying", "faces": "facing", "has": "with", "have": "with", "contains": "with",
}  # fmt: skip
COPULAS = word_set("is are was were be")
ENDS = word_set(
    "and or but of that which who whose while as where when to for from than then there so also says say saying reading labeled "
    "labelled should must can will would it they them not very quite only just exactly made painted covered filled surrounded seen shown taken placed"
    " everywhere together here him me us far away instead too again after all asleep awake out whom nothing anywhere somewhere"
)
STOPS = ENDS | COPULAS | VERBS.keys() | INDEFINITE | DEFINITE | ABSENT | NUMBERS.keys()
"""Words before which a noun phrase ends."""
NOUNS_IN_ING = word_set(
    "building painting drawing ring king wing string ceiling wedding thing spring morning evening clothing railing dining parking "
    "living washing sewing swimming shopping lighting lettering earring duckling pudding dumpling sapling stocking icing frosting awning "
    "viking bedding"
)
NAMES = frozenset(
    (("hot", "dog"), ("round", "table"), ("open", "air"), ("stone", "wall"), ("glass", "house"), ("orange", "juice"))
)
"""Names of objects whose first word is a quality or colour elsewhere."""
VACUOUS = word_set("visible other real single such actual more second third")
"""Adjectives that restrict nothing: "no visible clouds" are no clouds."""
_PLACES = word_set(
    "front top bottom middle center centre side left right corner end distance background foreground scene shape texture kind type sort home "
    "part half edge foot way other others night day morning evening afternoon dawn dusk noon sunset sunrise winter summer spring autumn "
    "january february april june july august september october november december"
)
_MANNERS = word_set("style view shot lens lighting look")
IRREGULAR = {
    "people": "person", "children": "child", "men": "man", "women": "woman", "mice": "mouse", "feet": "foot", "geese": "goose",
    "teeth": "tooth", "knives": "knife", "wolves": "wolf", "leaves": "leaf", "shelves": "shelf", "loaves": "loaf", "dice": "die",
    "buses": "bus", "canvases": "canvas", "lenses": "lens", "gases": "gas", "irises": "iris", "octopuses": "octopus", "walruses": "walrus",
    "potatoes": "potato", "tomatoes": "tomato", "mangoes": "mango", "heroes": "hero", "volcanoes": "volcano",
    "cookies": "cookie", "brownies": "brownie", "smoothies": "smoothie", "movies": "movie", "zombies": "zombie", "hoodies": "hoodie",
    "elves": "elf", "scarves": "scarf", "calves": "calf", "thieves": "thief", "quizzes": "quiz", "clothes": "clothes", "topazes": "topaz",
}  # fmt: skip
SINGULAR = word_set("tennis basis iris oasis gas lens this")
FOREIGN = word_set(  # articles, numbers, places and colours that are no English words: French, German, Spanish, Italian, Portuguese, Dutch
    "un une et est sont avec dans au aux à deux trois quatre cinq sept huit neuf dix entre devant derrière droite dessus dessous rouge "
    "rouges bleue bleus bleues vert verte verts vertes jaune jaunes blanc blanche blancs blanches noire noirs noires gris grise "
    "ein eine einen einem einer der das und mit auf über neben vor hinter zwischen zwei drei vier fünf sechs sieben acht neun zehn ist sind "
    "roter rotes roten blau blaue blauer blaues grün grüne grünes gelb gelbe gelbes schwarz schwarze weiß weiße "
    "una uno dos tres cuatro cinco seis siete ocho nueve diez sobre bajo debajo encima junto izquierda derecha rojo roja rojos rojas azul "
    "azules verde verdes amarillo amarilla negra blanco blanca gli due tre quattro cinque sei sette otto dieci sopra sotto accanto sinistra "
    "destra rosso rossa rossi rosse blu giallo gialla nero nera bianco bianca um uma dois duas três quatro não vermelho vermelha amarelo "
    "preto branco een het twee drie vijf zes zeven tien op met naast onder boven rood rode blauw blauwe groen groene geel gele zwart zwarte"
)
BORROWED = word_set("le la les el los las il lo de du des di da von van con sur sous noir bleu gauche die")
"""Words that count half, because they occur in names and borrowed words."""
ELIDED = ("l'", "d'", "qu'", "dell'", "un'")


def names_no_thing(noun: str, is_compound: bool, is_coloured: bool) -> bool:
    """Whether a noun names a place, a time or a manner, and no object. "Side table" and "white background" are objects, "studio lighting" is none."""
    return noun in _MANNERS or (noun in _PLACES and not is_compound and not (is_coloured and noun == "background"))


def singular(word: str) -> str:
    """Singular of a noun; the word itself where it is not a plural."""
    if word in IRREGULAR:
        return IRREGULAR[word]
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("ches", "shes", "sses", "xes", "tzes", "zzes")):
        return word[:-2]
    if word.endswith("s") and not word.endswith(("ss", "us")) and len(word) > 2 and word not in SINGULAR:
        return word[:-1]
    return word


def plural(noun: str) -> str:
    """Plural of a noun in the singular. Of "cup of tea" the first noun changes."""
    head, of, rest = noun.partition(" of ")
    *before, last = head.split()
    known = {single: many for many, single in IRREGULAR.items()}
    if last in known:
        many = known[last]
    elif last.endswith("y") and last[-2:-1] not in "aeiou":
        many = last[:-1] + "ies"
    elif last.endswith(("ch", "sh", "s", "x", "z")) and singular(last) == last:
        many = last + "es"
    else:
        many = last if singular(last) != last else last + "s"
    return " ".join((*before, many)) + of + rest
