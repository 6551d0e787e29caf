"""langchain-openai against the server whose address is the argument; prints its answers as JSON."""

import json
import sys

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)


model = ChatOpenAI(
    model="smol-draft",
    base_url=f"{sys.argv[1]}/v1",
    api_key="none",
    max_retries=0,
    temperature=0,
    max_tokens=80,
)
short = model.bind(max_tokens=8)
structured = {
    method: model.with_structured_output(Person, method=method, strict=True).invoke("Who is there?")
    for method in ("json_schema", "function_calling")
}
calls = model.bind_tools([Person], tool_choice="any", strict=True).invoke("Who is there?").tool_calls
print(
    json.dumps(
        {
            "chat": short.invoke("Say hello.").content,
            "stream": [part.content for part in short.stream("Say hello.")],
            "structured": {method: person.model_dump() for method, person in structured.items()},
            "call": [calls[0]["name"], Person.model_validate(calls[0]["args"]).model_dump()],
        }
    )
)
