// Pictures for the next message: dropped, pasted or chosen.
import { element } from "./dom.js";

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];

function read(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  });
}

/** An image element of a data URL. */
export function thumbnail(url, name) {
  const image = element("img", "thumbnail");
  image.src = url;
  image.alt = name;
  return image;
}

export class Pictures {
  taken = false; // whether the model takes pictures
  #all = []; // {name, url}
  #list;
  #trouble;

  /** list: where they are shown; trouble: says what went wrong. */
  constructor(list, trouble) {
    this.#list = list;
    this.#trouble = trouble;
  }

  /** The pictures as parts of a message. */
  get parts() {
    return this.#all.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  }

  /** Those of an earlier message in place of what is here; without parts, none. */
  set(parts = []) {
    this.#all = parts.map((part) => ({ name: "picture", url: part.image_url.url }));
    this.#show();
  }

  /** Files of a drop, a paste or a choice. Returns whether there were any. */
  async add(files) {
    const found = [...files];
    if (!found.length) return false;
    if (!this.taken) {
      this.#trouble(new Error("this model takes no pictures"));
      return true;
    }
    for (const file of found) {
      if (!KINDS.includes(file.type)) {
        this.#trouble(new Error(`${file.name} is no PNG, JPEG, WebP or GIF`));
        continue;
      }
      const name = file.name || "pasted picture";
      try {
        this.#all.push({ name, url: await read(file) });
      } catch (problem) {
        this.#trouble(new Error(`${name} cannot be read: ${problem.message}`));
      }
    }
    this.#show();
    return true;
  }

  #show() {
    const items = this.#all.map((picture) => {
      const remove = element("button", "remove", "Remove");
      remove.type = "button";
      remove.setAttribute("aria-label", `Remove ${picture.name}`);
      remove.addEventListener("click", () => {
        this.#all = this.#all.filter((other) => other !== picture);
        this.#show();
      });
      return element("li", "", thumbnail(picture.url, picture.name), remove);
    });
    this.#list.replaceChildren(...items);
    this.#list.hidden = !items.length;
  }
}
