/** Splits text into what is shown as it is and characters that would be invisible, move the cursor or turn the writing. */

export interface Sign {
  /** What stands in its place. */
  glyph: string;
  /** "U+202E RIGHT-TO-LEFT OVERRIDE" */
  name: string;
}

export type Piece = string | Sign;

const NAMES: Record<number, string> = {
  0x00: "NULL", 0x07: "BELL", 0x08: "BACKSPACE", 0x0b: "VERTICAL TAB", 0x0c: "FORM FEED", 0x0d: "CARRIAGE RETURN",
  0x1b: "ESCAPE", 0x7f: "DELETE", 0x85: "NEXT LINE", 0x9b: "CONTROL SEQUENCE INTRODUCER", 0xad: "SOFT HYPHEN",
  0x61c: "ARABIC LETTER MARK", 0x200b: "ZERO WIDTH SPACE", 0x200c: "ZERO WIDTH NON-JOINER", 0x200d: "ZERO WIDTH JOINER",
  0x200e: "LEFT-TO-RIGHT MARK", 0x200f: "RIGHT-TO-LEFT MARK", 0x2028: "LINE SEPARATOR", 0x2029: "PARAGRAPH SEPARATOR",
  0x202a: "LEFT-TO-RIGHT EMBEDDING", 0x202b: "RIGHT-TO-LEFT EMBEDDING", 0x202c: "POP DIRECTIONAL FORMATTING",
  0x202d: "LEFT-TO-RIGHT OVERRIDE", 0x202e: "RIGHT-TO-LEFT OVERRIDE", 0x2060: "WORD JOINER",
  0x2066: "LEFT-TO-RIGHT ISOLATE", 0x2067: "RIGHT-TO-LEFT ISOLATE", 0x2068: "FIRST STRONG ISOLATE",
  0x2069: "POP DIRECTIONAL ISOLATE", 0xfeff: "ZERO WIDTH NO-BREAK SPACE",
};

/** ASCII's names of its controls. The pictures that Unicode has of them are in few fonts. */
const CONTROLS = ["NUL", "SOH", "STX", "ETX", "EOT", "ENQ", "ACK", "BEL", "BS", "TAB", "LF", "VT", "FF", "CR", "SO", "SI", "DLE",
  "DC1", "DC2", "DC3", "DC4", "NAK", "SYN", "ETB", "CAN", "EM", "SUB", "ESC", "FS", "GS", "RS", "US"];

// Controls but tab and line feed, bidi controls, invisible and unassigned formats, tag characters, lone surrogates.
const UNSEEN =
  /[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u115f\u1160\u180e\u200b-\u200f\u2028-\u202f\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\uffff]|[\u{e0000}-\u{e0fff}]|\p{Cs}/gu;
const EMOJI = /\p{Extended_Pictographic}|\u{fe0f}|[\u{1f3fb}-\u{1f3ff}]/u;

/** A zero width joiner between two emoji makes one of them; anywhere else it hides. */
function joinsEmoji(text: string, at: number): boolean {
  const before = Array.from(text.slice(Math.max(0, at - 2), at)).pop() ?? "";
  const after = Array.from(text.slice(at + 1, at + 3))[0] ?? "";
  return EMOJI.test(before) && EMOJI.test(after);
}

export function signOf(code: number): Sign {
  const hex = code.toString(16).toUpperCase().padStart(4, "0");
  const glyph = CONTROLS[code] ?? (code === 0x7f ? "DEL" : `U+${hex}`);
  return { glyph, name: `U+${hex} ${NAMES[code] ?? (code < 0xa0 ? "CONTROL" : "INVISIBLE")}` };
}

/** For places that take no elements, such as hints and choices: signs in place of what would not be seen. */
export function spelled(text: string | null | undefined): string {
  return pieces(text ?? "").map((piece) => (typeof piece === "string" ? piece : `[${piece.glyph}]`)).join("");
}

/**
 * Example: pieces("a\u001b[31mb") is ["a", {glyph: "ESC", name: "U+001B ESCAPE"}, "[31mb"].
 */
export function pieces(text: string): Piece[] {
  const found: Piece[] = [];
  let end = 0;
  for (const match of text.matchAll(UNSEEN)) {
    const code = match[0].codePointAt(0) ?? 0;
    if (code === 0xfffd || (code === 0x200d && joinsEmoji(text, match.index))) continue;
    if (match.index > end) found.push(text.slice(end, match.index));
    found.push(signOf(code));
    end = match.index + match[0].length;
  }
  if (end < text.length) found.push(text.slice(end));
  return found;
}
