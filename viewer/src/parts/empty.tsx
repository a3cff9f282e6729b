/** Says what is missing, and why. */

export function Empty({ title, why }: { title: string; why: string }) {
  return (
    <div class="empty" role="status">
      <h2>{title}</h2>
      <p>{why}</p>
    </div>
  );
}
