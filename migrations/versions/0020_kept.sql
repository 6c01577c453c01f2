-- Compiled views keep the values of subqueries.

alter table gdq.compiled_view add column kept jsonb, add column kept_at text;
comment on column gdq.compiled_view.kept is 'Values of subqueries, as text, by a hash of their SQL; NULL for none.';
comment on column gdq.compiled_view.kept_at is 'The position of the target at which the values are good.';
