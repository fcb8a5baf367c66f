"""A tool that the model must call. Its arguments always fit the tool's schema (`strict`)."""

import json
import sys

from openai import OpenAI

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


def main(url: str = "http://127.0.0.1:8000") -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        reply = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": "What is the weather in Paris?"}],
            tools=[WEATHER],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=100,
            temperature=0,
        )
        (call,) = reply.choices[0].message.tool_calls
        arguments = json.loads(call.function.arguments)
        print(f"{call.function.name}(city={arguments['city']!r}, unit={arguments['unit']!r})")


if __name__ == "__main__":
    main(*sys.argv[1:])
