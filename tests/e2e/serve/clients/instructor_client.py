"""instructor against the server whose address is the argument; prints its answer as JSON."""

import sys

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)


client = instructor.from_openai(
    openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0), mode=instructor.Mode.TOOLS
)
person = client.chat.completions.create(
    model="smol-draft",
    response_model=Person,
    messages=[{"role": "user", "content": "Who is there?"}],
    max_tokens=80,
    temperature=0,
    max_retries=0,
)
assert isinstance(person, Person)
print(person.model_dump_json())
