// What the tab remembers. sessionStorage: gone with the tab, and shared with no other.

export function load(name, otherwise) {
  try {
    return JSON.parse(sessionStorage.getItem(`pocketllm-${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function save(name, value) {
  try {
    sessionStorage.setItem(`pocketllm-${name}`, JSON.stringify(value));
  } catch {
    // Full or refused: the page goes on, it only forgets on reload.
  }
}
