-- Compiled views have a function that looks at their logs. The next refresh of a view makes its functions anew.

delete from gdq.compiled_view;
alter table gdq.compiled_view add column look text not null;
comment on column gdq.compiled_view.look is 'Name of the function that finds the logs with changes.';
