// The calls of tools in an answer, and the form for their results.
import { button, element } from "./dom.js";

/** Add a chunk's parts to the calls so far. */
export function gather(calls, parts) {
  for (const { index, id, function: made } of parts) {
    const call = (calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } });
    call.function.name += made.name ?? "";
    call.function.arguments += made.arguments ?? "";
  }
}

/** A call: its name, and its arguments as they would be written by hand. */
export function shownCall({ function: { name, arguments: text } }) {
  const pre = element("pre", "", element("code", "", pretty(text)));
  pre.tabIndex = 0;
  return element("div", "code", element("div", "code-head", `call of ${name}`), pre);
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // still on its way, or cut off
  }
}

/** A form with a field for each call; send gets the results as messages. */
export function resultsForm(calls, send) {
  const fields = calls.map((call) => {
    const area = element("textarea");
    area.rows = 2;
    return { call, area, label: element("label", "", `Result of ${call.function.name} `, area) };
  });
  const results = () =>
    fields.map(({ call, area }) => {
      return { role: "tool", tool_call_id: call.id, content: area.value };
    });
  const go = button("Send results", "Send results of the calls", () => send(results()));
  go.dataset.idle = "";
  return element("div", "results", ...fields.map(({ label }) => label), go);
}
