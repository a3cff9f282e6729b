/** A button that copies a text, and says that it did. */
import { useState } from "preact/hooks";
import { sentence } from "../hooks";

export function Copy({ label, what, title }: { label: string; what: () => string | Promise<string>; title?: string }) {
  const [said, say] = useState("");
  const copy = async () => {
    try {
      await write(await what());
      say("copied");
    } catch (error) {
      say(sentence(error));
    }
    setTimeout(() => say(""), 2500);
  };
  return <button type="button" onClick={copy} title={title}>{said || label}<span class="unseen" role="status">{said}</span></button>;
}

async function write(text: string): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // A page from disk has no clipboard of its own in some browsers.
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "unseen";
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    if (!done) throw new Error("the browser does not let this page copy");
  }
}
