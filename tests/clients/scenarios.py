"""What every client asks: one tool, one form, one prompt that does not fit. Standard library only,
since each client runs in an environment of its own.
"""

SYSTEM = "You are terse."
PROMPT = "def fibonacci(n):"
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PROMPT}]

CITIES = ["Ulm", "Bonn"]
"""The values of the tool's argument: few, so that a call ends soon with every model."""

WEATHER_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": WEATHER_PARAMETERS,
    },
}
WEATHER_CHOICE = {"type": "function", "function": {"name": "get_weather"}}
WEATHER_RESULT = "Sunny, 21 degrees."

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "enum": ["Ada", "Alan"]},
        "age": {"type": "integer", "enum": [36, 41]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PERSON_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "person", "schema": PERSON, "strict": True},
}

TOO_LONG = "for line in lines: print(line)\n" * 1500
"""More tokens than the 4,096 of the embedded model."""


def check_person(person):
    """A value that the form PERSON allows."""
    assert set(person) == {"name", "age"}, person
    assert person["name"] in ("Ada", "Alan"), person
    assert person["age"] in (36, 41), person


def check_weather_arguments(arguments):
    """Arguments that the tool WEATHER allows."""
    assert set(arguments) == {"city"}, arguments
    assert arguments["city"] in CITIES, arguments
