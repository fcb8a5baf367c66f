// The server's API. The key lives in this variable alone: a reload forgets it.
let key = "";
/** A request's parameter -> the field that sets it. */
const FIELDS = {
  temperature: "temperature", max_tokens: "tokens", seed: "seed", prediction: "prediction",
  response_format: "schema", tools: "tools", messages: "prompt", prompt: "prompt",
};

export function useKey(typed) {
  key = typed.trim();
}

export class Refused extends Error {
  /** fields: the form's elements that are at fault. */
  constructor(status, message, fields = []) {
    super(message);
    [this.status, this.fields] = [status, fields];
  }
}

const at = (path) => new URL(path, document.baseURI);
const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});

/** Where the server is in its life: {status, doing}. */
export async function stage() {
  return (await fetch(at("ready"))).json();
}

/** The model: its name, and whether it takes pictures. */
export async function model() {
  const reply = await fetch(at("v1/models"), { headers: headers() });
  if (!reply.ok) throw await refusal(reply);
  const { id, input_modalities: takes } = (await reply.json()).data[0];
  return { name: id, sees: (takes ?? []).includes("image") };
}

/** The chunks of a streamed answer, each with the time of its arrival in ms. */
export async function* stream(path, ask, signal) {
  const reply = await fetch(at(`v1/${path}`), {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify({ ...ask, stream: true, include_speculation: true }),
    signal,
  });
  if (!reply.ok) throw await refusal(reply);
  for await (const data of events(reply.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(500, chunk.error.message);
    if (chunk.choices.length) yield { at: performance.now(), choice: chunk.choices[0] };
  }
}

async function refusal(reply) {
  const error = (await reply.json().catch(() => null))?.error;
  const message = error?.message ?? `the server answered ${reply.status}`;
  return new Refused(reply.status, message, fieldsOf(reply.status, error?.param));
}

/** The form's fields behind a refusal: its parameter may go on, as `tools[0].function` does. */
function fieldsOf(status, param) {
  const id = status === 401 ? "key" : FIELDS[/^\w+/.exec(param ?? "")?.[0]];
  return id ? [document.getElementById(id)] : [];
}

/** The data of server-sent events. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Refused(0, "the answer broke off: the connection was lost");
    text += value;
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: "));
      if (data.length) yield data.map((line) => line.slice(6)).join("\n");
    }
  }
}
