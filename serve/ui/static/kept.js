// What a reload of this tab brings back: the conversation and the options, never the API key.
const PLACE = "specdec";

/** Keep it. Returns whether it fits; the reads, which are most of it, go first. */
export function keep(fields, turns) {
  const bare = turns.map((turn) => ({ ...turn, reads: [] }));
  return [turns, bare].some((all) => {
    try {
      sessionStorage.setItem(PLACE, JSON.stringify({ fields, turns: all }));
      return true;
    } catch {
      return false; // full, or forbidden by the browser's settings
    }
  });
}

/** {fields, turns} of this tab's last page; empty where there is none. */
export function kept() {
  try {
    return JSON.parse(sessionStorage.getItem(PLACE)) ?? { fields: {}, turns: [] };
  } catch {
    return { fields: {}, turns: [] };
  }
}
