/** A value that few parts of a page look at: they are drawn again when it changes, and nothing else is. */
import { useEffect, useState } from "preact/hooks";

export class Cell<T> {
  private listeners = new Set<() => void>();

  constructor(private value: T) {}

  get(): T {
    return this.value;
  }

  set(value: T): void {
    if (value === this.value) return;
    this.value = value;
    for (const listener of this.listeners) listener();
  }

  watch(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }
}

export function useCell<T>(cell: Cell<T>): T {
  const [, again] = useState(0);
  useEffect(() => cell.watch(() => again((n) => n + 1)), [cell]);
  return cell.get();
}
