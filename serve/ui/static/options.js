// The form's fields: which are invalid, in words, and what they add to a request.
import { Refused } from "./api.js";

const $ = (id) => document.getElementById(id);
const KEPT = [
  "mode", "view", "speculate", "think", "system", "temperature", "tokens", "seed",
  "prediction", "schema", "tools",
];
/** The invalid fields within an element, as a Refused in words; null: none. */
export function fault(within) {
  const wrong = [...within.querySelectorAll("input, textarea")].flatMap((field) => {
    const words = wordsFor(field);
    return words ? [{ field, words: `${nameOf(field)} ${words}.` }] : [];
  });
  if (!wrong.length) return null;
  const words = wrong.map((one) => one.words).join(" ");
  return new Refused(0, words, wrong.map(({ field }) => field));
}

function nameOf(field) {
  return field.labels[0].firstChild.textContent.trim();
}

function wordsFor(field) {
  const { validity, min, max, value } = field;
  if (validity.badInput) return "is no number";
  if (validity.rangeUnderflow) return `must be at least ${min}, not ${value}`;
  if (validity.rangeOverflow) return `must be at most ${max}, not ${value}`;
  if (validity.stepMismatch && field.step === "1") return `must be a whole number, not ${value}`;
  if (validity.valueMissing) return "is empty";
  return field.id === "schema" || field.id === "tools" ? jsonFault(field) : "";
}

function jsonFault({ id, value }) {
  if (!value.trim()) return "";
  try {
    const found = JSON.parse(value);
    return id === "tools" && !Array.isArray(found) ? "must be a list in JSON: [{…}]" : "";
  } catch (problem) {
    return `is no JSON: ${problem.message}`;
  }
}

/** The options' part of a request on this route. */
export function request(path) {
  const value = (id) => $(id).value.trim();
  const ask = {};
  if (value("temperature")) ask.temperature = Number(value("temperature"));
  if (value("tokens")) ask.max_tokens = Number(value("tokens"));
  if (value("seed")) ask.seed = Number(value("seed"));
  if ($("prediction").value) ask.prediction = { type: "content", content: $("prediction").value };
  if (value("schema")) {
    const schema = JSON.parse(value("schema"));
    ask.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (!$("speculate").checked) ask.speculative = { enabled: false };
  if (path !== "chat/completions") return ask;
  ask.chat_template_kwargs = { enable_thinking: $("think").checked };
  if (value("tools")) ask.tools = JSON.parse(value("tools"));
  return ask;
}

/** The system prompt as messages: one, or none. */
export function system() {
  const content = $("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}

/** Whether the same request gives the same answer. */
export function repeats() {
  return Number($("temperature").value || 1) === 0 || $("seed").value.trim() !== "";
}

const part = (field) => (field.type === "checkbox" ? "checked" : "value");

/** The fields as a reload finds them again. */
export function fields() {
  const all = KEPT.map($);
  return Object.fromEntries(all.map((field) => [field.id, field[part(field)]]));
}

export function fill(values) {
  for (const id of KEPT) if (id in values) $(id)[part($(id))] = values[id];
}
