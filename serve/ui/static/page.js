// The page: a conversation, and a race.
import { wholeLegend } from "./answer.js";
import { Refused, model, stage, stream, useKey } from "./api.js";
import { Conversation } from "./conversation.js";
import { announce } from "./dom.js";
import { keep, kept } from "./kept.js";
import { fault, fields, fill, repeats, request, system } from "./options.js";
import { Pictures } from "./pictures.js";
import { race } from "./race.js";
import { Turn, apart } from "./turn.js";

const $ = (id) => document.getElementById(id);
let running = null; // what aborts the request under way
let editing = null; // the turn whose message is in the composer
const pictures = new Pictures($("pictures"), trouble);
const conversation = new Conversation($("conversation"), $("welcome"));
const actions = {
  edit,
  regenerate: (turn) => alone($("options"), (signal) => regenerate(turn, signal)),
  results: (turn, sent) => {
    const next = conversation.indexOf(turn) + 1;
    alone($("options"), (signal) => exchange("chat/completions", sent, next, signal));
  },
};

/** Show a problem, open the panels of the fields at fault and go to the first. Null: none. */
function trouble(problem) {
  if (problem?.name === "AbortError") return;
  document.querySelectorAll("[aria-invalid]").forEach((field) => {
    field.removeAttribute("aria-invalid");
    field.removeAttribute("aria-describedby");
  });
  $("trouble").textContent = problem?.message ?? "";
  $("trouble").hidden = !problem;
  const wrong = problem?.fields ?? [];
  wrong.forEach(mark);
  wrong[0]?.focus();
}

function mark(field) {
  field.setAttribute("aria-invalid", "true");
  field.setAttribute("aria-describedby", "trouble");
  const panel = field.closest("details");
  if (panel) panel.open = true;
}

/** Wait for the server, and for a key where it needs one. */
async function connect() {
  for (;;) {
    const { status, doing } = await stage().catch(() => ({ status: "away", doing: "no answer" }));
    $("state").textContent = status === "ready" ? "ready" : `${status}: ${doing}`;
    if (status === "ready") break;
    await new Promise((later) => setTimeout(later, 1000));
  }
  try {
    const found = await model();
    pictures.taken = found.sees;
    $("picture-choice").hidden = !found.sees;
    const pictured = found.sees ? " (takes pictures: drop or paste one)" : "";
    $("model").textContent = found.name + pictured;
    document.title = `${found.name} – specdec`;
    trouble(null);
  } catch (problem) {
    trouble(problem);
  }
}

/** Do one thing at a time, which Stop ends, where the fields within an element are valid. */
async function alone(within, work) {
  if (running) return;
  trouble(null);
  const wrong = fault(within);
  if (wrong) return trouble(wrong);
  running = new AbortController();
  busy(true);
  try {
    announce((await work(running.signal)) ?? "");
  } catch (problem) {
    if (problem.name === "AbortError") announce("Stopped");
    trouble(problem);
  } finally {
    running = null;
    busy(false);
  }
}

/** While a request is under way Stop is there, and what would send another one is not. */
function busy(is) {
  const from = document.activeElement;
  $("stop").hidden = !is;
  document.querySelectorAll("[data-idle]").forEach((control) => (control.disabled = is));
  if (is && from.matches("[data-idle]")) $("stop").focus();
  else if (!is && !from.getClientRects().length) $("prompt").focus();
}

/** The route and the new messages that the composer stands for. */
function composed() {
  const text = $("prompt").value;
  const path = $("mode").value === "completion" ? "completions" : "chat/completions";
  if (pictures.parts.length && path === "completions") {
    throw new Refused(0, "Pictures need the mode chat.", [$("mode")]);
  }
  const content = pictures.parts.length ? [...pictures.parts, { type: "text", text }] : text;
  return [path, [{ role: "user", content }]];
}

/** A request's body: the options, and either a prompt or all messages up to the new ones. */
function body(path, sent, index) {
  if (path === "completions") return { ...request(path), prompt: sent[0].content };
  return { ...request(path), messages: [...system(), ...conversation.before(index), ...sent] };
}

/** Send messages as the turn of this index. The turns there come back where nothing is answered. */
async function exchange(path, sent, index, signal, begun = () => {}) {
  const ask = body(path, sent, index);
  const turn = new Turn(path, sent, actions);
  const replaced = conversation.replace(index, [turn]);
  $("race").hidden = true; // it would stand below the answer, and keep that from view
  turn.box.scrollIntoView({ block: "nearest" });
  turn.wait();
  try {
    for await (const { at, choice } of stream(path, ask, signal)) {
      if (turn.empty) begun();
      follow(() => turn.take(choice, at));
    }
  } catch (problem) {
    turn.note = problem.name === "AbortError" ? "Stopped." : `Broken off: ${problem.message}`;
    throw problem;
  } finally {
    follow(() => turn.finish());
    if (turn.empty) conversation.replace(index, replaced);
    if (conversation.indexOf(editing) < 0) leaveEdit(); // it was among the replaced
    save();
  }
  const calls = turn.calls.map((call) => ` Call of ${call.function.name}.`).join("");
  return `Answer complete: ${turn.answer.words}. ${turn.text}${calls}`;
}

async function send(signal) {
  const [path, sent] = composed();
  const index = editing ? conversation.indexOf(editing) : conversation.length;
  return exchange(path, sent, index, signal, clear);
}

async function regenerate(turn, signal) {
  const { path, sent } = turn;
  const words = await exchange(path, sent, conversation.indexOf(turn), signal);
  if (repeats()) {
    $("hint").textContent = "Temperature 0 or a seed: the answer is the same each time.";
  }
  return words;
}

/** Put a message back into the composer; Send then replaces it and all after it. */
function edit(turn) {
  const { text, pictures: parts } = apart(turn.sent[0].content);
  clear();
  editing = turn;
  conversation.mark(conversation.indexOf(turn));
  $("editing").hidden = false;
  $("mode").value = turn.path === "completions" ? "completion" : "chat";
  $("prompt").value = text;
  pictures.set(parts);
  $("prompt").focus();
}

/** What is in the composer is a new message from now on. */
function leaveEdit() {
  editing = null;
  conversation.mark(Infinity);
  $("editing").hidden = true;
}

/** Empty the composer. */
function clear() {
  leaveEdit();
  $("hint").textContent = "";
  $("prompt").value = "";
  pictures.set();
}

/** Let the page grow, and stay at its end if that is where the reader is. */
function follow(grow) {
  const main = document.querySelector("main");
  const atEnd = main.scrollHeight - main.scrollTop - main.clientHeight < 40;
  grow();
  if (atEnd) main.scrollTop = main.scrollHeight;
}

function save() {
  if (keep(fields(), conversation.kept)) return;
  $("hint").textContent = "Too large to keep: a reload brings back an earlier state.";
}

function restore() {
  const found = kept();
  fill(found.fields);
  conversation.replace(0, found.turns.map((turn) => Turn.from(turn, actions)));
  const main = document.querySelector("main");
  main.scrollTop = main.scrollHeight;
}

function startAnew() {
  clear();
  conversation.replace(0, []);
  $("race").hidden = true;
  trouble(null);
  save();
  $("prompt").focus();
}

function show() {
  document.body.dataset.view = $("view").value;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  alone($("ask"), send);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
$("run-race").addEventListener("click", () => {
  alone($("ask"), (signal) => {
    const [path, sent] = composed();
    return race(path, body(path, sent, conversation.length), signal);
  });
});
$("picture").addEventListener("change", async () => {
  await pictures.add($("picture").files);
  $("picture").value = "";
});
document.addEventListener("paste", (event) => {
  const { files, types } = event.clipboardData;
  if (!files.length || types.includes("text/plain")) return; // a table has a picture beside
  event.preventDefault();
  pictures.add(files);
});
for (const kind of ["dragover", "drop"]) {
  document.addEventListener(kind, (event) => {
    if (!event.dataTransfer.types.includes("Files")) return; // a text goes where it is dropped
    event.preventDefault();
    if (kind === "drop") pictures.add(event.dataTransfer.files);
  });
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing) running?.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", startAnew);
$("leave-edit").addEventListener("click", () => {
  clear();
  $("prompt").focus();
});
$("view").addEventListener("change", show);
$("key").addEventListener("change", () => {
  useKey($("key").value);
  connect();
});
window.addEventListener("pagehide", save); // an answer under way is kept as far as it came
$("welcome").append(wholeLegend());
restore();
show();
connect();
