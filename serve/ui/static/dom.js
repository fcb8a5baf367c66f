// Elements. A string becomes a text node, never HTML.

/** An element with classes and children. */
export function element(name, classes = "", ...children) {
  const made = document.createElement(name);
  if (classes) made.className = classes;
  made.append(...children);
  return made;
}

/** A button with a short text and a whole name, for readers without the picture around it. */
export function button(text, name, press) {
  const made = element("button", "small", text);
  made.type = "button";
  made.setAttribute("aria-label", name);
  made.addEventListener("click", () => press(made));
  return made;
}

/** A button that copies the text which `text()` returns at the press. */
export function copier(name, text) {
  return button("Copy", name, async (pressed) => {
    pressed.textContent = (await copied(text())) ? "Copied" : "Not copied";
    announce(pressed.textContent);
    setTimeout(() => (pressed.textContent = "Copy"), 1500);
  });
}

/** Put a text into the clipboard. The browser's own way exists only over https and on localhost. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedFromArea(text);
  }
}

function copiedFromArea(text) {
  const focused = document.activeElement;
  const area = element("textarea", "unseen");
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return done;
}

/** A line for screen readers, read out when they are idle. */
export function announce(text) {
  document.getElementById("announce").textContent = text;
}
