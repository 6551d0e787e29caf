// Requests to the server that this page is from.

// Without credentials, which `fetch` refuses in a URL: the browser sends them by itself.
const base = new URL(".", `${location.origin}${location.pathname}`);
export const address = (path) => new URL(path, base).href;

export class RequestError extends Error {
  constructor(status, error) {
    super(error.message || `the server answered with the status ${status}`);
    this.status = status;
    this.param = error.param ?? null;
    this.code = error.code ?? null;
  }
}

async function refusal(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // A proxy between may answer with something else; the status says enough.
  }
  return new RequestError(response.status, error);
}

// Nobody has answered: the browser itself says no more than that it has failed.
function unreachable(error) {
  if (error.name === "AbortError") throw error;
  throw new RequestError(0, { message: "the server cannot be reached" });
}

export async function models() {
  const response = await fetch(address("v1/models")).catch(unreachable);
  if (!response.ok) throw await refusal(response);
  return (await response.json()).data;
}

// The chunks of a streamed response as they come. Leaving early, or the signal, ends the connection.
export async function* stream(path, body, signal) {
  const response = await fetch(address(path), {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  }).catch(unreachable);
  if (!response.ok) throw await refusal(response);
  let isDone = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") {
      isDone = true;
      break;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new RequestError(200, chunk.error);
    yield chunk;
  }
  if (!isDone) throw new RequestError(200, { message: "the connection ended before the answer did" });
}

// The data of server-sent events.
async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch(unreachable);
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      const blocks = rest.split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const lines = block.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
