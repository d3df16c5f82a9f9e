"""Questions that one function answers, or none: endless, from a seed, for learning when to call and with what.

Functions are put together from words (a quantity and what it is worked out from, an attribute of a thing, a search with filters, …),
so that no list of functions is learnt; a question belongs to one of them. Whoever is offered that one should call it, whoever is
offered another should not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

QUANTITIES = {
    "kinetic energy": ("mass kg", "speed m/s"),
    "momentum": ("mass kg", "velocity m/s"),
    "electrical power": ("voltage volts", "current amperes"),
    "resistance": ("voltage volts", "current amperes"),
    "density": ("mass kg", "volume cubic metres"),
    "pressure": ("force newtons", "area square metres"),
    "wavelength": ("frequency hertz", "wave_speed m/s"),
    "spring force": ("spring_constant N/m", "extension metres"),
    "cylinder volume": ("radius cm", "height cm"),
    "cone surface": ("radius cm", "slant_height cm"),
    "trapezoid area": ("upper_side cm", "lower_side cm", "height cm"),
    "box volume": ("length cm", "width cm", "depth cm"),
    "hypotenuse": ("first_leg cm", "second_leg cm"),
    "sector area": ("radius cm", "angle degrees"),
    "simple interest": ("principal dollars", "rate percent", "years years"),
    "monthly rent share": ("rent dollars", "people persons"),
    "break-even units": ("fixed_cost dollars", "unit_price dollars", "unit_cost dollars"),
    "profit margin": ("revenue dollars", "cost dollars"),
    "fuel cost": ("distance km", "consumption litres/100km", "fuel_price dollars/litre"),
    "travel time": ("distance km", "average_speed km/h"),
    "running pace": ("distance km", "minutes minutes"),
    "calories burned": ("weight kg", "minutes minutes"),
    "water intake": ("weight kg", "exercise_minutes minutes"),
    "dilution volume": ("stock_concentration molar", "target_concentration molar", "final_volume ml"),
    "heat energy": ("mass grams", "specific_heat J/gK", "temperature_change kelvin"),
    "orbital period": ("semi_major_axis km", "central_mass kg"),
    "paint needed": ("wall_area square metres", "coats layers"),
    "tiles needed": ("floor_area square metres", "tile_side cm"),
    "crop yield": ("field_area hectares", "yield_per_hectare tonnes"),
    "download time": ("file_size megabytes", "bandwidth Mbit/s"),
}
THINGS = {
    "river": (("length", "source", "discharge"), ("Danube", "Mekong", "Orinoco", "Volga", "Zambezi", "Loire")),
    "mountain": (("height", "first ascent", "rock type"), ("Aconcagua", "Denali", "Elbrus", "Matterhorn", "Kinabalu")),
    "planet": (("diameter", "moons", "day length"), ("Venus", "Saturn", "Neptune", "Mercury", "Uranus")),
    "composer": (
        ("symphonies", "birthplace", "teachers"),
        ("Dvorak", "Sibelius", "Clara Schumann", "Vivaldi", "Ravel"),
    ),
    "novel": (("author", "publication year", "summary"), ("Middlemarch", "Dracula", "Moby Dick", "Emma", "Ulysses")),
    "company": (("headquarters", "share price", "employees"), ("Siemens", "Toyota", "Nestle", "Volvo", "Philips")),
    "chemical element": (
        ("melting point", "atomic number", "isotopes"),
        ("zinc", "argon", "cobalt", "iodine", "radium"),
    ),
    "bird": (("wingspan", "diet", "range"), ("kestrel", "puffin", "nightingale", "osprey", "heron")),
    "programming language": (
        ("latest version", "designer", "license"),
        ("Haskell", "Erlang", "Julia", "Prolog", "Ada"),
    ),
    "football club": (("stadium", "coach", "last result"), ("Ajax", "Benfica", "Celtic", "River Plate", "Feyenoord")),
    "museum": (
        ("opening hours", "ticket price", "director"),
        ("the Prado", "the Uffizi", "the Hermitage", "the Rijksmuseum"),
    ),
    "treaty": (("signatories", "date", "articles"), ("Westphalia", "Utrecht", "Ghent", "Tordesillas", "Maastricht")),
    "gene": (("chromosome", "function", "variants"), ("TP53", "CFTR", "HBB", "APOE", "FOXP2")),
    "dish": (("ingredients", "cooking time", "origin"), ("goulash", "ratatouille", "pierogi", "paella", "moussaka")),
}
PLACES = (
    "Lisbon",
    "Oslo",
    "Nairobi",
    "Kyoto",
    "Quito",
    "Prague",
    "Denver",
    "Perth",
    "Dublin",
    "Cusco",
    "Hanoi",
    "Turin",
    "Boston",
    "Accra",
)
COUNTRIES = "Portugal Norway Kenya Japan Ecuador Chile Vietnam Ghana Ireland Peru Mongolia Jordan Estonia Uruguay Nepal"
FOODS = "rice beans onions garlic tofu lemons mint walnuts honey ginger salmon basil oats figs"
SEARCHES = {
    "restaurants": ("cuisine", ("Thai", "Greek", "Korean", "vegan", "Lebanese")),
    "hotels": ("stars", (2, 3, 4, 5)),
    "apartments": ("bedrooms", (1, 2, 3, 4)),
    "concerts": ("genre", ("jazz", "folk", "baroque", "techno", "blues")),
    "language courses": ("language", ("Finnish", "Swahili", "Welsh", "Tamil", "Czech")),
    "hiking trails": ("difficulty", ("easy", "moderate", "hard")),
    "gyms": ("facility", ("pool", "sauna", "climbing wall")),
    "used cars": ("fuel", ("diesel", "electric", "petrol", "hybrid")),
    "dentists": ("insurance", ("public", "private")),
    "volunteer jobs": ("field", ("animals", "teaching", "environment")),
    "flights": ("seat_class", ("economy", "business", "first")),
    "libraries": ("service", ("printing", "study rooms", "archives")),
}
UNITS = {
    "length": ("miles", "kilometres", "feet", "metres", "inches", "yards"),
    "weight": ("pounds", "kilograms", "ounces", "stones", "grams"),
    "temperature": ("celsius", "fahrenheit", "kelvin"),
    "volume": ("litres", "gallons", "pints", "cups"),
    "currency": ("USD", "EUR", "JPY", "GBP", "CHF", "INR"),
    "time": ("hours", "seconds", "days", "weeks"),
    "angle": ("degrees", "radians", "gradians"),
    "data": ("megabytes", "gigabytes", "kibibytes"),
}
STATISTICS = {
    "median": "the median of",
    "variance": "the variance of",
    "range": "the range of",
    "geometric mean": "the geometric mean of",
    "moving average": "a moving average over",
    "sum of squares": "the sum of the squares of",
    "sorted list": "a sorted copy of",
    "largest value": "the largest value of",
}
WORDS = (
    "lantern",
    "orchard",
    "granite",
    "whisper",
    "harbour",
    "saffron",
    "meadow",
    "compass",
    "velvet",
    "thunder",
    "a stitch in time",
    "the quick fox",
    "good morning",
    "where is the station",
)
TEXTS = {
    "count vowels": "Count the vowels in {}.",
    "translate": "Translate {} into {language}.",
    "detect language": "Which language is {} written in?",
    "sentiment": "Tell me the sentiment of {}.",
    "rhymes": "Find words that rhyme with {}.",
    "spell check": "Check the spelling of {}.",
    "synonyms": "Give me synonyms of {}.",
    "hash": "Compute the SHA-256 hash of {}.",
    "morse code": "Write {} in Morse code.",
}
PEOPLE = ("Mara", "Tomas", "Ingrid", "Kofi", "Yuki", "Elena", "Ravi", "Owen", "Fatima", "Pavel")
ACTIONS = {
    "send message": ("recipient", "text", "Send a message to {who} saying '{what}'."),
    "schedule meeting": ("attendee", "topic", "Schedule a meeting with {who} about {what}."),
    "create reminder": ("person", "subject", "Remind {who} of {what}."),
    "add contact": ("name", "note", "Add {who} to my contacts with the note '{what}'."),
    "assign task": ("assignee", "task", "Assign the task '{what}' to {who}."),
    "order gift": ("recipient", "item", "Order a {what} as a gift for {who}."),
    "book appointment": ("patient", "reason", "Book an appointment for {who} because of {what}."),
    "grade essay": ("student", "title", "Grade the essay '{what}' by {who}."),
}
MATTERS = (
    "the budget",
    "tax forms",
    "back pain",
    "garden tools",
    "the spring tour",
    "new tyres",
    "a lost parcel",
    "the choir",
)
SMALL_TALK = (
    "Hi there, how are you?",
    "Thanks, that was helpful!",
    "Tell me a joke.",
    "Who are you?",
    "Write a haiku about rain.",
    "What do you think of modern art?",
    "Good night!",
    "Explain why the sky is blue.",
)
TOPICS = """bus departures, ferry timetable, parking permit, road closures, tram fares, flight delay, cargo manifest, pilot licence, toll charges,
soil moisture, grain prices, milk production, pest outbreak, greenhouse humidity, tractor lease, seed stock, orchard harvest, beehive count,
heart rate history, vaccine appointment, blood sample, therapy plan, allergy report, dosage, sleep quality, nurse roster, hospital beds,
tax refund, pension forecast, mortgage offer, bond yield, invoice, insurance claim, credit limit, payroll, donation total, audit trail,
exam results, lecture notes, tuition fees, library fines, thesis draft, scholarship, class schedule, reading list, lab report,
rainfall record, tide table, air quality, pollen forecast, earthquake history, glacier extent, wind chill, sunshine hours, avalanche risk,
recipe, wine list, catering order, calorie count, grocery basket, menu, coffee beans, leftovers, kitchen inventory,
chess rating, marathon times, league table, transfer fee, medal count, swimming lanes, fixture list, betting odds, training plan,
concert tickets, album reviews, film festival, gallery exhibits, sheet music, poem, podcast episodes, book sales, theatre seats,
server load, disk usage, backup, firewall rule, build status, bug report, domain name, password reset, license key, data export,
election turnout, census data, court ruling, patent, trade balance, crime rate, building permit, visa application, water bill,
star chart, satellite pass, reaction yield, boiling point, beam deflection, cable resistance, battery life, pump efficiency, tensile strength,
gift card, shoe sizes, delivery slot, warranty, spare parts, discount code, furniture assembly, paint colours, curtain length,
puppy adoption, aquarium temperature, bird sightings, tree inventory, whale migration, kennel booking, fossil records, coral cover"""
SYLLABLES = "ar bel cor dan el far gol hal in jor kel lum mar nor ol pra quin ros sel tor ul ven wil xan yor zem ti ra mo lo ne ka"
QUERIES = (
    "get fetch retrieve find calculate compute estimate lookup search analyze predict check list compare summarise"
)
ACTIONS_ON = "create book order schedule update cancel send register reserve request print renew"
# Keys of one parameter, or of several that are told of together (with ","); type; description; phrases. Values: `_value`
SLOTS = (
    ("city location destination place origin", "place", "The city.", "in {}|for {}|near {}"),
    ("country nation region", "country", "The country.", "in {}|of {}|for {}"),
    (
        "from,to start,end origin,destination source_city,target_city",
        "place",
        "City.",
        "from {} to {}|between {} and {}",
    ),
    ("person customer_name client employee author player user", "person", "Full name.", "for {}|of {}|by {}"),
    ("first_name,last_name", "name", "Part of the name.", "for {} {}"),
    ("company organisation brand team manufacturer", "invented", "Its name.", "of {}|at {}|from {}"),
    ("title subject label name", "quoted", "The title.", "titled '{}'|called \"{}\"|with the title '{}'"),
    ("year season_year", "year", "The year.", "in {}|for {}|for the year {}"),
    ("start_year,end_year from_year,to_year", "years", "Year.", "from {} to {}|between {} and {}"),
    ("date day start_date", "date", "The date.", "on {}|for {}"),
    ("time start_time", "time", "Time of day.", "at {}"),
    ("days num_days period", "integer", "Number of days.", "for the next {} days|over {} days|within {} days"),
    ("people guests party_size group_size", "integer", "Number of people.", "for {} people|for a group of {}"),
    (
        "limit max_results count num_results",
        "integer",
        "How many results.",
        "showing {} results|limited to {}|the top {}",
    ),
    (
        "budget max_price amount price",
        "number",
        "In dollars.",
        "for at most ${}|with a budget of {} dollars|for {} dollars",
    ),
    ("rate percentage interest", "number", "In percent.", "at {}%|at a rate of {} percent"),
    ("probability share threshold", "fraction", "Between 0 and 1.", "with a probability of {}|at a threshold of {}"),
    ("temperature degrees", "number", "In degrees Celsius.", "at {} degrees|at {}°C"),
    ("weight mass weight_kg", "number", "In kg.", "weighing {} kg|with a mass of {} kg|for {} kg"),
    ("height length width depth", "number", "In cm.", "with a size of {} cm|measuring {} cm"),
    ("distance radius range_km", "number", "In km.", "within {} km|over a distance of {} kilometers"),
    ("duration minutes length_minutes", "integer", "In minutes.", "for {} minutes|lasting {} minutes"),
    ("x,y a,b first,second value1,value2", "number", "A number.", "for {} and {}|given {} and {}|with {} and {}"),
    ("a,b,c side1,side2,side3 length,width,height", "number", "A number.", "with {}, {} and {}|for {}, {}, {}"),
    ("latitude,longitude lat,lon", "degree", "In degrees.", "at latitude {} and longitude {}|at ({}, {})"),
    ("numbers values data readings", "integers", "List of numbers.", "for the numbers {}|with the values {}|given {}"),
    ("measurements scores series", "numbers", "List of numbers.", "with the scores {}|from the measurements {}"),
    ("items tags ingredients keywords features", "strings", "List of words.", "with {}|containing {}|including {}"),
    ("email contact", "email", "Address.", "to {}|for {}"),
    ("id order_id reference code", "code", "Its number.", "with the number {}|number {}|for reference {}"),
    ("size", "small medium large", "The size.", "of {} size|in size {}"),
    ("unit units", "metric imperial", "System of units.", "in {} units"),
    ("format output_format file_type", "json csv pdf xml", "Format.", "as {}|in {} format"),
    ("level difficulty grade", "beginner intermediate advanced expert", "The level.", "at {} level|for {}s"),
    ("sort_by order_by ranking", "price rating date distance", "What is sorted by.", "sorted by {}|by {}"),
    ("gender sex", "male female", "Of the person.", "for a {}|for {}s"),
    ("language lang", "English French German Spanish Hindi Japanese", "The language.", "in {}"),
    ("frequency interval", "daily weekly monthly yearly", "How often.", "{}|on a {} basis"),
    (
        "kind type category",
        "standard premium basic vintage organic digital",
        "Which kind.",
        "of the {} kind|for {} ones",
    ),
    ("detailed verbose with_details", "flag", "Whether details are given.", "with details|in detail|without details"),
    ("include_images images", "flag", "Whether images are shown.", "with images|including images|without images"),
    ("include_history history", "flag", "Whether the past is shown.", "including the history|without the history"),
    ("exact precise", "flag", "Whether it is exact.", "exactly|with exact figures|without exactness"),
)
NO_CALL = ("None of the functions can do that.", "I have no function for this.", "The functions do not help here.")


Asked = tuple[str, dict[str, Any]]
"""A question, and the arguments of the call that answers it."""


@dataclass(frozen=True, slots=True)
class Function:
    """Written by `function`."""

    tool: dict[str, Any]
    ask: Callable[[random.Random], Asked]

    @property
    def name(self) -> str:
        return str(self.tool["function"]["name"])


def function(draw: random.Random) -> Function:
    return draw.choice(_KINDS)(draw)


def conversation(draw: random.Random, num_turns: int, fitting: float) -> dict[str, Any]:
    """One to three functions and ``num_turns`` questions, as `stretto sft` reads them; a share ``fitting`` of the questions is about
    one of the functions, the others about none. Questions do not hang together, and no results are shown: each teaches one decision."""
    offered = [function(draw) for _ in range(draw.choice((1, 1, 1, 2, 3)))]
    messages: list[dict[str, Any]] = []
    for _ in range(num_turns):
        if draw.random() < fitting:
            chosen = draw.choice(offered)
            text, told = chosen.ask(draw)
            order = chosen.tool["function"]["parameters"]["properties"]
            arguments = {key: told[key] for key in order if key in told}
            call = {"type": "function", "function": {"name": chosen.name, "arguments": arguments}}
            answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        else:
            other = function(draw)
            while other.name in {each.name for each in offered}:
                other = function(draw)
            text = draw.choice(SMALL_TALK) if draw.random() < 0.08 else other.ask(draw)[0]
            answer = {"role": "assistant", "content": draw.choice(NO_CALL)}
        messages += [{"role": "user", "content": text}, answer]
    return {"messages": messages, "tools": list({each.name: each.tool for each in offered}.values())}


def _tool(draw: random.Random, words: str, what: str, fields: Mapping[str, dict[str, Any]], required: list[str]) -> Any:
    parts = words.replace("-", " ").split()
    style = draw.randrange(4)
    name = "_".join(parts) if style < 2 else parts[0] + "".join(part.title() for part in parts[1:])
    name = f"{draw.choice(('tools', 'api', 'helper', 'service'))}_{'_'.join(parts)}" if style == 3 else name
    kept = list(fields)
    if draw.random() < 0.3:
        draw.shuffle(kept)
    schema = {"type": "object", "properties": {key: fields[key] for key in kept}, "required": required}
    return {"type": "function", "function": {"name": name, "description": what, "parameters": schema}}


def _option(
    draw: random.Random, texts: tuple[str, ...], said: str
) -> tuple[dict[str, Any], Callable[[random.Random], Asked]]:
    """A field that may be left out: its schema, and what a question may say of it."""
    schema: dict[str, Any] = {"type": "string", "description": f"One of {', '.join(texts)}. Default is '{texts[0]}'."}
    if draw.random() < 0.5:
        schema["enum"] = list(texts)

    def ask(draw: random.Random) -> Asked:
        value = draw.choice(texts)
        return (said.format(value), {"value": value}) if draw.random() < 0.5 else ("", {})

    return schema, ask


def _number(draw: random.Random) -> int | float:
    return draw.choice(
        (
            draw.randrange(2, 20),
            draw.randrange(20, 1000),
            draw.randrange(1, 400) * 25,
            round(draw.uniform(0.1, 99), draw.choice((1, 2))),
        )
    )


def _quantity(draw: random.Random) -> Function:
    name = draw.choice(list(QUANTITIES))
    parts = [part.partition(" ")[::2] for part in QUANTITIES[name]]
    kinds = {key: draw.choice(("integer", "number")) for key, _ in parts}
    fields: dict[str, Any] = {
        key: {"type": kinds[key], "description": f"The {key.replace('_', ' ')} in {unit}."} for key, unit in parts
    }
    option, choose = _option(
        draw, draw.choice((("exact", "rounded"), ("metric", "imperial"), ("short", "detailed"))), " Give it {}."
    )
    key_of_option = draw.choice(("output", "mode", "format"))
    has_option = draw.random() < 0.5
    if has_option:
        fields[key_of_option] = option
    verb = draw.choice(("calculate", "compute", "get", "determine", "estimate"))
    tool = _tool(
        draw,
        f"{verb} {name}",
        f"{verb.title()} the {name} from {' and '.join(key.replace('_', ' ') for key, _ in parts)}.",
        fields,
        [key for key, _ in parts],
    )

    def ask(draw: random.Random) -> Asked:
        values = {key: draw.randrange(1, 500) if kinds[key] == "integer" else _number(draw) for key, _ in parts}
        told = [
            f"{draw.choice(('a ', 'the '))}{key.replace('_', ' ')} {draw.choice(('of ', 'is ', '= '))}{values[key]} {unit}"
            for key, unit in parts
        ]
        told = [text.replace(" is ", " of ") for text in told] if draw.random() < 0.7 else told
        lead = draw.choice(
            (
                f"What is the {name} for ",
                f"Calculate the {name} with ",
                f"Find the {name} given ",
                f"I need the {name}: ",
            )
        )
        more, chosen = choose(draw) if has_option else ("", {})
        text = lead + ", ".join(told[:-1]) + " and " + told[-1] + draw.choice(("?", "."))
        return text + more, {**values, **({key_of_option: chosen["value"]} if chosen else {})}

    return Function(tool, ask)


def _lookup(draw: random.Random) -> Function:
    thing = draw.choice(list(THINGS))
    attributes, names = THINGS[thing]
    attribute, key = draw.choice(attributes), draw.choice(("name", thing.split()[-1], f"{thing.split()[-1]}_name"))
    fields: dict[str, Any] = {key: {"type": "string", "description": f"Name of the {thing}."}}
    option, choose = _option(draw, ("English", "French", "German"), " Answer in {}.")
    has_option = draw.random() < 0.4
    if has_option:
        fields["language"] = option
    verb = draw.choice(("get", "find", "lookup", "retrieve"))
    tool = _tool(draw, f"{verb} {thing} {attribute}", f"{verb.title()} the {attribute} of a {thing}.", fields, [key])

    def ask(draw: random.Random) -> Asked:
        name = draw.choice(names)
        text = draw.choice(
            (
                "What is the {a} of {n}?",
                "Tell me the {a} of the {t} {n}.",
                "Look up {n}: the {a}, please.",
                "I want to know the {a} of {n}.",
            )
        )
        more, chosen = choose(draw) if has_option else ("", {})
        said = text.format(a=attribute, n=name, t=thing) + more
        return said, {key: name.removeprefix("the "), **({"language": chosen["value"]} if chosen else {})}

    return Function(tool, ask)


def _search(draw: random.Random) -> Function:
    what = draw.choice(list(SEARCHES))
    filter_key, values = SEARCHES[what]
    place_key, most_key = draw.choice(("city", "location", "place")), draw.choice(("max_price", "limit", "radius_km"))
    is_number = isinstance(values[0], int)
    fields: dict[str, Any] = {
        place_key: {"type": "string", "description": "The city to search in."},
        filter_key: {
            "type": "integer" if is_number else "string",
            "description": f"The {filter_key.replace('_', ' ')} wanted.",
        },
        most_key: {
            "type": "integer",
            "description": {
                "max_price": "Highest price in dollars.",
                "limit": "How many results. Default is 10.",
                "radius_km": "Search radius in kilometres. Default is 5.",
            }[most_key],
        },
    }
    if not is_number and draw.random() < 0.4:
        fields[filter_key]["enum"] = list(values)
    required = [place_key, filter_key]
    verb = draw.choice(("find", "search", "list"))
    tool = _tool(
        draw, f"{verb} {what}", f"{verb.title()} {what} in a city by {filter_key.replace('_', ' ')}.", fields, required
    )

    def ask(draw: random.Random) -> Asked:
        place, value = draw.choice(PLACES), draw.choice(values)
        shown = f"{value} {filter_key}" if is_number else value
        text = draw.choice(
            (
                f"Find {what} in {place} with {shown}",
                f"Which {what} are there in {place} ({shown})",
                f"I am looking for {what} in {place}, {filter_key.replace('_', ' ')}: {value}",
            )
        )
        arguments: dict[str, Any] = {place_key: place, filter_key: value}
        if draw.random() < 0.5:
            most = draw.randrange(2, 60) * (10 if most_key == "max_price" else 1)
            arguments[most_key] = most
            text += {
                "max_price": f", at most {most} dollars",
                "limit": f", the first {most}",
                "radius_km": f", within {most} km",
            }[most_key]
        return text + draw.choice(("?", ".", "")), arguments

    return Function(tool, ask)


def _conversion(draw: random.Random) -> Function:
    kind = draw.choice(list(UNITS))
    keys = draw.choice(
        (("value", "from_unit", "to_unit"), ("amount", "source", "target"), ("quantity", "unit_from", "unit_to"))
    )
    about = "The amount to convert.", f"Unit of {kind} to convert from.", f"Unit of {kind} to convert to."
    fields: dict[str, Any] = {
        key: {"type": "number" if not place else "string", "description": text}
        for place, (key, text) in enumerate(zip(keys, about, strict=True))
    }
    tool = _tool(
        draw,
        draw.choice((f"convert {kind}", f"{kind} converter")),
        f"Convert a {kind} from one unit to another.",
        fields,
        list(keys),
    )

    def ask(draw: random.Random) -> Asked:
        value, (first, second) = _number(draw), draw.sample(UNITS[kind], 2)
        text = draw.choice(("How many {b} are {v} {a}?", "Convert {v} {a} to {b}.", "What is {v} {a} in {b}?"))
        return text.format(v=value, a=first, b=second), dict(zip(keys, (value, first, second), strict=True))

    return Function(tool, ask)


def _statistic(draw: random.Random) -> Function:
    name = draw.choice(list(STATISTICS))
    key = draw.choice(("numbers", "values", "data"))
    kind = draw.choice(("integer", "number"))
    fields: dict[str, Any] = {key: {"type": "array", "items": {"type": kind}, "description": "The list of numbers."}}
    is_wide = name == "moving average"
    if is_wide:
        fields["window"] = {"type": "integer", "description": "How many neighbours are averaged."}
    verb = draw.choice(("calculate", "get", "statistics"))
    tool = _tool(
        draw, f"{verb} {name}", f"The {name} of a list of numbers.", fields, [key, *(["window"] if is_wide else [])]
    )

    def ask(draw: random.Random) -> Asked:
        values = [
            draw.randrange(1, 200) if kind == "integer" else round(draw.uniform(0, 50), 1)
            for _ in range(draw.randrange(3, 7))
        ]
        window, told = draw.randrange(2, 4), ", ".join(map(str, values))
        told = f"[{told}]" if draw.random() < 0.5 else told
        text = draw.choice(("Find {} {}.", "What is {} {}?", "I need {} {}."))
        text = text.format(STATISTICS[name], told)
        return (
            (f"{text} Use a window of {window}.", {key: values, "window": window}) if is_wide else (text, {key: values})
        )

    return Function(tool, ask)


def _value(draw: random.Random, kind: str) -> tuple[Any, str]:
    """A value, and how a question says it."""
    match kind:
        case "place":
            value: Any = draw.choice(PLACES) if draw.random() < 0.5 else _word(draw)
            value += f", {_word(draw)}" if draw.random() < 0.15 else ""
        case "country":
            value = _pick(draw, COUNTRIES) if draw.random() < 0.7 else f"{_word(draw)}land"
        case "name":
            value = draw.choice(PEOPLE) if draw.random() < 0.5 else _word(draw)
        case "person":
            value = f"{draw.choice(PEOPLE)} {_word(draw)}"
        case "invented":
            value = " ".join(_word(draw) for _ in range(draw.choice((1, 1, 2))))
        case "quoted":
            value = draw.choice((*MATTERS, *WORDS)) if draw.random() < 0.6 else f"{_word(draw)} {draw.choice(WORDS)}"
        case "year":
            value = draw.randrange(1820, 2031)
        case "date":
            value = draw.choice(
                ("{y}-{m:02}-{d:02}", "{d:02}/{m:02}/{y}", "{name} {d}, {y}", "next {week}", "{week}")
            ).format(
                y=draw.randrange(1990, 2031),
                m=draw.randrange(1, 13),
                d=draw.randrange(1, 29),
                name=_pick(draw, "January March April June August October December"),
                week=_pick(draw, "Monday Tuesday Thursday Friday Sunday"),
            )
        case "time":
            value = f"{draw.randrange(24):02}:{draw.choice((0, 15, 30, 45)):02}"
            value = draw.choice((value, f"{draw.randrange(1, 12)} {draw.choice(('am', 'pm'))}"))
        case "integer":
            value = draw.randrange(2, draw.choice((10, 40, 400)))
        case "number":
            value = _number(draw)
        case "fraction":
            value = draw.randrange(1, 100) / 100
        case "degree":
            value = round(draw.uniform(-90, 90), draw.choice((1, 2, 4)))
        case "integers" | "numbers":
            one = (lambda: draw.randrange(1, 200)) if kind == "integers" else (lambda: round(draw.uniform(0, 50), 1))
            value = [one() for _ in range(draw.randrange(2, 7))]
            return value, draw.choice((str(value), ", ".join(map(str, value)), _enumerated(value)))
        case "strings":
            value = draw.sample((*FOODS.split(), *WORDS[:10]), draw.randrange(1, 4))
            return value, _enumerated(value)
        case "email":
            value = f"{draw.choice(PEOPLE).lower()}.{_word(draw).lower()}@example.{draw.choice(('com', 'org'))}"
        case "code":
            value = f"{draw.choice(('', 'A-', 'INV', 'ref_', 'QX'))}{draw.randrange(10**3, 10**7)}"
        case _:
            value = _pick(draw, kind)
    return value, str(value)


def _pick(draw: random.Random, words: str) -> str:
    return draw.choice(words.split())


def _word(draw: random.Random) -> str:
    """A name that nobody has learnt."""
    return "".join(_pick(draw, SYLLABLES) for _ in range(draw.choice((2, 2, 3)))).title()


def _enumerated(values: list[Any]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} and {last}" if most else last


TYPES = {
    "integer": "integer",
    "year": "integer",
    "years": "integer",
    "number": "number",
    "fraction": "number",
    "degree": "number",
}


def _form(draw: random.Random) -> Function:
    """A topic, and parameters that know nothing of it: some must be told, others may, and what is not told is left out."""
    topic, is_query = draw.choice(TOPICS.replace("\n", " ").split(",")).strip(), draw.random() < 0.7
    verb = _pick(draw, QUERIES if is_query else ACTIONS_ON)
    slots: list[tuple[list[str], str, list[str], bool]] = []
    fields: dict[str, dict[str, Any]] = {}
    required: list[str] = []
    for keys, kind, about, phrases in draw.sample(SLOTS, draw.choice((1, 2, 2, 3, 3, 4, 5))):
        those = draw.choice(keys.split()).split(",")
        is_needed = not slots or draw.random() < (0.3 if kind == "flag" else 0.7)
        if set(those) & fields.keys():
            continue
        is_enum = " " in kind
        field: dict[str, Any] = {"type": TYPES.get(kind, "boolean" if kind == "flag" else "string")}
        if kind in ("integers", "numbers", "strings"):
            item = {"integers": "integer", "numbers": "number", "strings": "string"}[kind]
            field = {"type": "array", "items": {"type": item}}
        is_whole = kind == "number" and draw.random() < 0.5
        if is_whole:
            field["type"] = "integer"
        if is_enum and draw.random() < 0.6:
            field["enum"] = kind.split()
        elif is_enum:
            about = f"{about} One of {', '.join(kind.split())}."
        if not is_needed:
            default = kind.split()[0] if is_enum else {"flag": "false"}.get(kind, "")
            about += draw.choice((" Optional.", f" Default is {default}." if default else " May be left out.", ""))
        subject = draw.choice((topic, "search", "result", "request"))
        for key in those:
            what = f"The {key.replace('_', ' ')} of the {subject}." if draw.random() < 0.3 else about
            fields[key] = {**field, "description": what}
        required += those if is_needed else []
        slots.append((those, "integer" if is_whole else kind, phrases.split("|"), is_needed))
    told = _enumerated([key.replace("_", " ") for key in fields])
    what = (
        f"{verb.title()} the {topic}{draw.choice(('', f' for a given {told}', f' based on {told}', ' of interest'))}."
    )
    words = draw.choice(
        (f"{verb} {topic}", f"{verb} {topic}", f"{topic} {verb}", topic, f"{topic.split()[-1]} {verb} {topic}")
    )
    tool = _tool(draw, words, what, fields, required)

    def ask(draw: random.Random) -> Asked:
        arguments: dict[str, Any] = {}
        said: list[str] = []
        for keys, kind, phrases, is_needed in draw.sample(slots, len(slots)) if draw.random() < 0.5 else slots:
            if not is_needed and draw.random() < 0.5:
                continue
            phrase = draw.choice(phrases)
            if kind == "flag":
                arguments[keys[0]] = "without" not in phrase
                said.append(phrase)
                continue
            values = [_value(draw, "year" if kind == "years" else kind) for _ in keys]
            if kind == "years":
                values.sort()
            arguments.update(zip(keys, (value for value, _ in values), strict=True))
            said.append(phrase.format(*(text for _, text in values)))
        lead = draw.choice(ASKS if is_query else ORDERS).format(topic=topic, verb=verb)
        text = f"{lead} {draw.choice((' ', ' ', ', ')).join(said)}".replace(" , ", ", ")
        text = text[0].upper() + text[1:]
        return text + ("?" if lead.startswith(("What", "Can", "Could")) else draw.choice((".", ""))), arguments

    return Function(tool, ask)


ASKS = (
    *(
        "What is the {topic}",
        "What's the {topic}",
        "Find the {topic}",
        "Get me the {topic}",
        "Can you tell me the {topic}",
    ),
    *(
        "I want to know the {topic}",
        "Show the {topic}",
        "{verb} the {topic}",
        "Tell me about the {topic}",
        "I need the {topic}",
    ),
    *(
        "Could you {verb} the {topic}",
        "Give me the {topic}",
        "I'm interested in the {topic}",
        "Please {verb} the {topic}",
    ),
)
ORDERS = (
    *("{verb} the {topic}", "Please {verb} a {topic}", "I'd like to {verb} the {topic}", "Could you {verb} a {topic}"),
    *("I have to {verb} the {topic}", "{verb} a {topic}", "Can you {verb} my {topic}", "Help me {verb} the {topic}"),
)


def _text(draw: random.Random) -> Function:
    name = draw.choice(list(TEXTS))
    key = draw.choice(("text", "input", "phrase", "string"))
    fields: dict[str, Any] = {key: {"type": "string", "description": "The text."}}
    required = [key]
    if name == "translate":
        fields["language"] = {"type": "string", "description": "Language to translate into."}
        required.append("language")
    elif draw.random() < 0.4:
        fields["ignore_case"] = {"type": "boolean", "description": "Whether case is ignored. Default is false."}
    tool = _tool(
        draw,
        name if name in ("translate",) or draw.random() < 0.5 else f"{name} text",
        f"{name.capitalize()} of a text.",
        fields,
        required,
    )

    def ask(draw: random.Random) -> Asked:
        text, language = draw.choice(WORDS), draw.choice(("Finnish", "Swahili", "Welsh", "Czech", "Spanish"))
        said, arguments = TEXTS[name].format(draw.choice(("'{}'", '"{}"')).format(text), language=language), {key: text}
        if name == "translate":
            return said, {**arguments, "language": language}
        if "ignore_case" in fields and draw.random() < 0.4:
            return f"{said} Ignore case.", {**arguments, "ignore_case": True}
        return said, arguments

    return Function(tool, ask)


def _action(draw: random.Random) -> Function:
    name = draw.choice(list(ACTIONS))
    who, what, text = ACTIONS[name]
    fields: dict[str, Any] = {
        who: {"type": "string", "description": f"Who: the {who}."},
        what: {"type": "string", "description": f"The {what}."},
        "time": {"type": "string", "description": "When, as HH:MM. Default is now."},
    }
    if draw.random() < 0.5:
        fields["priority"] = {
            "type": "string",
            "enum": ["low", "normal", "high"],
            "description": "Default is 'normal'.",
        }
    tool = _tool(draw, name, f"{name.capitalize()} for somebody.", fields, [who, what])

    def ask(draw: random.Random) -> Asked:
        arguments = {who: draw.choice(PEOPLE), what: draw.choice(MATTERS)}
        said = text.format(who=arguments[who], what=arguments[what])
        if draw.random() < 0.4:
            arguments["time"] = f"{draw.randrange(7, 21):02}:{draw.choice(('00', '15', '30'))}"
            said = f"{said.rstrip('.')} at {arguments['time']}."
        if "priority" in fields and draw.random() < 0.4:
            arguments["priority"] = draw.choice(("low", "high"))
            said += f" Priority: {arguments['priority']}."
        return said, arguments

    return Function(tool, ask)


_KINDS: tuple[Callable[[random.Random], Function], ...] = (
    *(_quantity, _quantity, _quantity, _lookup, _lookup, _search, _search),
    *(_conversion, _statistic, _text, _action, *(_form,) * 11),
)
