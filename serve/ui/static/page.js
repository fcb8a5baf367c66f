// The page: a conversation, and a race.
import { Answer, element } from "./answer.js";
import { Refused, model, stage, stream, useKey } from "./api.js";
import { Pictures } from "./pictures.js";
import { race } from "./race.js";

const $ = (id) => document.getElementById(id);
const history = []; // the chat's messages
let running = null; // what aborts the request under way
let name = ""; // the model's
const pictures = new Pictures($("pictures"), trouble);

function trouble(problem) {
  if (problem?.name === "AbortError") return;
  const message = problem?.message ?? "";
  $("trouble").textContent = message;
  $("trouble").hidden = !message;
  if (problem instanceof Refused && problem.status === 401) {
    $("options").open = true;
    $("key").focus();
  }
}

/** Wait for the server, and for a key where it asks for one. */
async function connect() {
  for (;;) {
    const { status, doing } = await stage().catch(() => ({ status: "away", doing: "no answer" }));
    $("state").textContent = status === "ready" ? "ready" : `${status}: ${doing}`;
    if (status === "ready") break;
    await new Promise((later) => setTimeout(later, 1000));
  }
  try {
    const found = await model();
    name = found.name;
    pictures.taken = found.sees;
    $("picture-choice").hidden = !found.sees;
    $("model").textContent = name + (found.sees ? " (takes pictures: drop or paste one)" : "");
    document.title = `${name} – specdec`;
    trouble(null);
  } catch (problem) {
    trouble(problem);
  }
}

/** What is asked for: the route, and the request's body. */
function wish(prompt) {
  const value = (id) => $(id).value.trim();
  const ask = { temperature: Number(value("temperature")), max_tokens: Number(value("tokens")) };
  if (value("seed")) ask.seed = Number(value("seed"));
  if ($("prediction").value) ask.prediction = { type: "content", content: $("prediction").value };
  if (value("schema")) {
    ask.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parsed(value("schema")) } };
  }
  if ($("mode").value === "completion") {
    if (pictures.parts.length) throw new Refused(0, "pictures need the mode chat");
    return ["completions", { ...ask, prompt }];
  }
  return ["chat/completions", { ...ask, messages: [...history, { role: "user", content: content(prompt) }] }];
}

/** A message's content: its text, behind its pictures. */
function content(prompt) {
  const parts = pictures.parts;
  return parts.length ? [...parts, { type: "text", text: prompt }] : prompt;
}

function parsed(schema) {
  try {
    return JSON.parse(schema);
  } catch (problem) {
    throw new Refused(0, `the schema is no JSON: ${problem.message}`);
  }
}

/** Do one thing at a time, which Stop ends. */
async function alone(work) {
  if (running) return;
  trouble(null);
  running = new AbortController();
  busy(true);
  try {
    $("announce").textContent = (await work(running.signal)) ?? "";
  } catch (problem) {
    trouble(problem);
  } finally {
    running = null;
    busy(false);
  }
}

function busy(is) {
  for (const id of ["send", "run-race", "new"]) $(id).disabled = is;
  $("stop").hidden = !is;
}

async function send(signal) {
  const prompt = $("prompt").value;
  const [path, ask] = wish(prompt);
  if (!$("speculate").checked) ask.speculative = { enabled: false };
  const answer = new Answer();
  const box = element("article", "answer", element("h3", "unseen", "Answer"), answer.root);
  $("welcome").hidden = true;
  const said = content(prompt);
  $("conversation").append(element("article", "user", ...pictures.shown, prompt), box);
  box.scrollIntoView();
  let text = "";
  try {
    for await (const { at, choice } of stream(path, ask, signal)) {
      text += choice?.delta?.content ?? choice?.text ?? "";
      follow(() => (choice?.speculation ?? []).forEach((read) => answer.add(read, at)));
    }
  } finally {
    follow(() => answer.finish());
    if (path === "chat/completions" && text) {
      history.push({ role: "user", content: said }, { role: "assistant", content: text });
      pictures.clear();
    }
  }
  $("prompt").value = "";
  return `Answer complete: ${answer.words}. ${text}`;
}

/** Let the page grow, and stay at its end if that is where the reader is. */
function follow(grow) {
  const main = document.querySelector("main");
  const atEnd = main.scrollHeight - main.scrollTop - main.clientHeight < 40;
  grow();
  if (atEnd) main.scrollTop = main.scrollHeight;
}

function startAnew() {
  history.length = 0;
  pictures.clear();
  $("conversation").replaceChildren($("welcome"));
  $("welcome").hidden = false;
  $("race").hidden = true;
  $("prompt").focus();
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  alone(send);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
$("run-race").addEventListener("click", () => {
  if ($("ask").reportValidity()) alone((signal) => race(...wish($("prompt").value), signal));
});
$("picture").addEventListener("change", async () => {
  await pictures.add($("picture").files);
  $("picture").value = "";
});
document.addEventListener("paste", (event) => {
  const { files } = event.clipboardData;
  if (files.length) event.preventDefault();
  pictures.add(files);
});
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  pictures.add(event.dataTransfer.files);
});
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", startAnew);
$("key").addEventListener("change", () => {
  useKey($("key").value);
  connect();
});
connect();
